"""The option of conversions about attacks."""

from __future__ import annotations

from ckptconv.options import TAKE
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Given, deciding


class AttackOptions(Given):
    """Whether attacks are read."""

    inert: bool = deciding(FLAG, "Convert the tensors of malicious files too; no code in them runs.", group=TAKE)


GIVEN = AttackOptions
