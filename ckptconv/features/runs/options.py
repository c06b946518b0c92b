"""The options that have the data of steps read."""

from __future__ import annotations

from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMMAND


class _Reading:
    check = Option(
        FLAG,
        "Read all data, and compare it with the recorded digests and checksums.",
        common=True,
    )
    stats = COMMAND["stats"].explained(
        "Read all values to count NaN and infinite ones, and to compute the norm of the weights. A step with NaN is "
        "not good."
    )


READING = options_in(_Reading)
