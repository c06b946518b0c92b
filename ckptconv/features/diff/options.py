"""The options of `diff`, with those that other features add."""

from __future__ import annotations

from importlib import import_module

from ckptconv.options import NAMING
from ckptconv.options.kinds import MOST_ITEMS, NUMBER, choice, counted
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMMAND, OPTIONS, VIEWING, Options, named_in


class _Comparing:
    """Options that only `diff` has, or that mean something else for it."""

    with_states = VIEWING["with_states"].explained(
        "Compare the optimizer states too, by parameter.", former="--optimizer"
    )
    dtype = Options.table["dtype"].explained(
        "Cast the floating tensors of both to DTYPE before they are compared.",
        "float32 for a DeepSpeed checkpoint, else keep",
    )
    map = Options.table["map"].explained(
        "Give the tensors of A the names and layouts that B has, by a map that comes with ckptconv (`ckptconv maps`) "
        "or a file of rules.",
    )
    rtol = Option(
        NUMBER,
        "Compare values, not bits; equal is what differs by at most R times the larger of both.",
        metavar="R",
        fallback="bits are compared; 0 with --atol",
        group=NAMING,
        common=True,
    )
    atol = Option(
        NUMBER,
        "Compare values, not bits; equal is what differs by at most A.",
        metavar="A",
        fallback="bits are compared; 0 with --rtol",
        group=NAMING,
        common=True,
    )
    tolerance = Option(
        choice("symmetric", "numpy"),
        "How far apart equal values may be: as math.isclose has it, the larger of A and R times the larger of both; or "
        "as numpy's isclose, A and R times that of B, together.",
        default="symmetric",
        group=NAMING,
    )
    top = Option(
        counted(1, MOST_ITEMS),
        "List the N tensors that differ most.",
        metavar="N",
        fallback="as many as fit a page; with --json, all tensors",
        common=True,
    )


# Features that add to them: the module of each, which has its options as `COMPARING`.
FEATURES: dict[str, str] = {
    "deltas": "ckptconv.features.deltas.comparing",
}
COMPARING_TOO: dict[str, Option] = {
    name: option for module in FEATURES.values() for name, option in import_module(module).COMPARING.items()
}
COMPARING = {**options_in(_Comparing), **COMPARING_TOO}
DIFFING = named_in(
    "key include exclude with_states order strip_prefix rename map size dtype dequantize rtol atol tolerance html "
    "overwrite jobs memory tag exclude_frozen_parameters master unstack raw alone inert spool_dir storage_options "
    + " ".join(COMPARING_TOO),
    {**OPTIONS, **COMMAND, **COMPARING},
)
# What the type of the keywords has, and its docstring.
KEYWORDS = DIFFING, "Options of `diff`."
