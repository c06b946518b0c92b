"""The options of `diff`, with those that other features add."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import NAMING
from ckptconv.options.kinds import MOST_ITEMS, NUMBER, choice, counted
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMMAND, OF_OPENING, OPTIONS, Options, named_in

_RULE = choice("symmetric", "numpy")


def _rule(value: Any, called: str) -> Any:
    """Return a rule. Raise UsageError for another value, such as the size of a difference."""
    if isinstance(value, (int, float)) or (isinstance(value, str) and value[:1].isdigit()):
        raise UsageError(
            f"{called} must be symmetric or numpy.", "Specify the largest difference with --rtol or --atol."
        )
    return _RULE.parse(value, called)


class _Comparing:
    """Options that only `diff` has, or that have another meaning for it."""

    with_states = OF_OPENING["with_states"].explained(
        "Also compare the optimizer states, by parameter.", former="--optimizer"
    )
    dtype = Options.table["dtype"].explained(
        "Cast the floating-point tensors of both sides to DTYPE before the comparison.",
        "float32 for a DeepSpeed checkpoint, else keep",
    )
    rtol = Option(
        NUMBER,
        "Compare values, not bits; two values are equal if they differ by at most R times the larger value.",
        metavar="R",
        fallback="bits are compared; 0 with --atol",
        group=NAMING,
        common=True,
    )
    atol = Option(
        NUMBER,
        "Compare values, not bits; two values are equal if they differ by at most A.",
        metavar="A",
        fallback="bits are compared; 0 with --rtol",
        group=NAMING,
        common=True,
    )
    tolerance = Option(
        _RULE._replace(parse=_rule),
        "The rule for the tolerance. symmetric (as math.isclose): the larger of atol and rtol × the larger value. "
        "numpy (as numpy.isclose): atol + rtol × the value in B.",
        default="symmetric",
        group=NAMING,
    )
    top = Option(
        counted(1, MOST_ITEMS),
        "List the N tensors that differ most.",
        metavar="N",
        fallback="as many as fit on a page; with --json, all tensors",
        common=True,
    )


# Features that add options, or explain options that they add to conversions: the module of each, with its options in
# `COMPARING`. `facing(a, b, stores)` there, if any, returns the opened A for a comparison with B.
# `advice(a, names, others)`, if any, yields hints on the names that only A has, and those that only B has.
FEATURES: dict[str, str] = {
    "deltas": "ckptconv.features.deltas.comparing",
    "maps": "ckptconv.features.maps.comparing",
}
_OF_FEATURES: dict[str, Option] = {
    name: option for module in FEATURES.values() for name, option in import_module(module).COMPARING.items()
}
COMPARING = {**options_in(_Comparing), **_OF_FEATURES}
COMPARING_TOO = {name: option for name, option in _OF_FEATURES.items() if name not in OPTIONS}
DIFFING = named_in(
    "key include exclude with_states order strip_prefix rename map size dtype dequantize rtol atol tolerance html "
    "overwrite jobs memory tag exclude_frozen_parameters master unstack raw alone inert spool_dir storage_options "
    + " ".join(COMPARING_TOO),
    {**OPTIONS, **COMMAND, **COMPARING},
)
# Advice on options of other functions.
INSTEAD = {"stats statistics": "The result has the size of each change: result.tensors[i].change."}
# The name of the keywords' type, and its docstring.
KEYWORDS = DIFFING, "Options of `diff`."
