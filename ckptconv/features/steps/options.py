"""The options of `steps`."""

from __future__ import annotations

from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMMAND


class _Steps:
    """Options that only `steps` has."""

    last = Option(FLAG, "Print the path of the last good step, and nothing else.", common=True)
    check = Option(
        FLAG,
        "Read all data, and compare it with the digests and checksums that whoever wrote it has left.",
        common=True,
    )
    stats = COMMAND["stats"].explained("Read all values: how many are NaN or infinite, and the norm of the weights.")


STEPS = options_in(_Steps)
