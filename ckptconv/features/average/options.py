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
        "How much each STEP counts, in order, such as 1,1,2; they may be negative, and the sum is divided by theirs.",
        metavar="W,...",
        fallback="1 for each",
        group=TAKE,
        common=True,
    )
    ema = Option(
        NUMBER,
        "Exponential moving average: each STEP counts by 1 - DECAY, and what was before it by DECAY.",
        metavar="DECAY",
        group=TAKE,
        common=True,
    )
    minus = Option(
        PATH,
        "Do not divide: the first STEP, and by their weights what the others have more than BASE; of one STEP, what it "
        "has more itself.",
        metavar="BASE",
        group=TAKE,
        common=True,
    )


AVERAGING = {**options_in(_Averaging), **COMBINING}
# What the type of the keywords has, and its docstring.
KEYWORDS = AVERAGING, "Options of `average`."
