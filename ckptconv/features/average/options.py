"""The options of `average`."""

from __future__ import annotations

from ckptconv.options import TAKE
from ckptconv.options.kinds import NUMBER, NUMBERS, PATH
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMBINING


class _Averaging:
    """Options that only `average` has."""

    weights = Option(
        NUMBERS,
        "The weights of the STEPs, in order, such as 1,1,2. They may be negative, but must not sum to zero.",
        metavar="W,...",
        fallback="equal weights",
        group=TAKE,
        common=True,
    )
    ema = Option(
        NUMBER,
        "Exponential moving average: DECAY times the previous average, plus 1 - DECAY times each STEP.",
        metavar="DECAY",
        group=TAKE,
        common=True,
    )
    minus = Option(
        PATH,
        "Task arithmetic: first STEP + Σ weight × (STEP − BASE) over the other STEPs. With one STEP: STEP − BASE.",
        metavar="BASE",
        group=TAKE,
        common=True,
    )


AVERAGING = {**options_in(_Averaging), **COMBINING}
# The name of the keywords' type, and its docstring.
KEYWORDS = AVERAGING, "Options of `average`."
