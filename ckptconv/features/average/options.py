"""The options of `average`."""

from __future__ import annotations

import math
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import TAKE
from ckptconv.options.kinds import PATH, ValueKind
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMBINING
from ckptconv.text import brief

_MOST_NUMBER = 1e100  # of which a thousand can be added up


def _numbers(value: Any, called: str) -> tuple[float, ...]:
    """Return finite numbers of a list, or of text with commas between them."""
    try:
        numbers = [float(text) for text in (value.split(",") if isinstance(value, str) else value)]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if not numbers or not all(abs(number) <= _MOST_NUMBER for number in numbers):
        raise UsageError(f"{called} is {brief(value)}; expected numbers, such as 1,1,2.")
    return tuple(numbers)


def _decay(value: Any, called: str) -> float:
    try:
        decay = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        decay = math.nan
    if not 0 <= decay <= 1:
        raise UsageError(f"{called} is {brief(value)}; expected a decay from 0 to 1, such as 0.99.")
    return decay


_NUMBERS = ValueKind(_numbers, stored=list, accepts="str | list[float] | tuple[float, ...]")
_DECAY = ValueKind(_decay, stored=float, accepts="float | str")


class _Averaging:
    """Options that only `average` has."""

    weights = Option(
        _NUMBERS,
        "The weights of the STEPs, in order, such as 1,1,2. Weights may be negative, but must not sum to zero.",
        metavar="W,...",
        fallback="equal weights",
        group=TAKE,
        common=True,
    )
    ema = Option(
        _DECAY,
        "Exponential moving average: DECAY times the previous average, plus 1 - DECAY times each STEP.",
        metavar="DECAY",
        group=TAKE,
        common=True,
    )
    minus = Option(
        PATH,
        "Task arithmetic: weight × first STEP + Σ weight × (STEP − BASE) over the others. With one STEP: weight × "
        "(STEP − BASE).",
        metavar="BASE",
        group=TAKE,
        common=True,
    )


AVERAGING = {**options_in(_Averaging), **COMBINING}
# What to do instead of arguments that it lacks, or has too many of.
INSTEAD = {
    "*": "Give the steps in a list: average([STEP, STEP], OUTPUT).",
    "decay ema_decay": "Use ema, the decay: ema=0.9.",
    "scale scaling scaling_factor lambda lam": "With minus, give the weights: "
    "average([BASE, TUNED], OUTPUT, minus=BASE, weights=[1, 0.5]) adds half of the difference.",
    "alpha alphas coefficients coeffs ratio ratios": "Use weights, one for each step, in order: weights=[0.3, 0.7].",
}
# The name of the keywords' type, and its docstring.
KEYWORDS = AVERAGING, "Options of `average`."
