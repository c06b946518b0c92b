"""The options of `merge`."""

from __future__ import annotations

from ckptconv.options import TAKE
from ckptconv.options.kinds import TEXT
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMBINING


class _Merging:
    """Options that only `merge` has."""

    adapter = Option(
        TEXT,
        "If ADAPTER contains several adapters, as TRL's checkpoints do with the reference, merge the adapter NAME.",
        metavar="NAME",
        fallback="the only one",
        group=TAKE,
        common=True,
    )


# Advice on the weight of an adapter, for users who look for an option.
SCALING = "The scale of an adapter is set in its adapter_config.json: multiply lora_alpha there by the weight."
INSTEAD = {
    "*": "Give several adapters in a list: merge(BASE, [ADAPTER, ADAPTER], OUTPUT).",
    "alpha lora_alpha scale scaling weight weights": SCALING,
}
MERGING = {**options_in(_Merging), **COMBINING}
# The name of the keywords' type, and its docstring.
KEYWORDS = MERGING, "Options of `merge`."
