"""The option of conversions that has their output verified."""

from __future__ import annotations

from ckptconv.options import RUNNING
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Given, option


class VerifyingOptions(Given):
    """Whether an output is verified before it is published."""

    verify: bool = option(FLAG, "Compare the output with the input before publishing it.", group=RUNNING, common=True)


GIVEN = VerifyingOptions
