"""The option of conversions about attacks."""

from __future__ import annotations

from ckptconv.options import TAKE
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Given, deciding


class AttackOptions(Given):
    """Whether attacks are read."""

    inert: bool = deciding(FLAG, "Convert the tensors of malicious files too; no code in them runs.", group=TAKE)


GIVEN = AttackOptions
# Options of other programs.
OTHER_OPTIONS = {
    "--trust-remote-code --no-weights-only --unsafe --safe": (
        "ckptconv runs no code from files, so it needs no trust; --inert converts the tensors of malicious files too."
    ),
    "--weights-only": "ckptconv runs no code from files; --key PATH selects the weights: inspect lists the keys.",
}
