"""The option of conversions that takes the last good step of a run."""

from __future__ import annotations

from ckptconv.options import TAKE
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Given, option


class StepOptions(Given):
    """The step of a run to convert."""

    last_good: bool = option(
        FLAG, "INPUT is a run. Convert its last step that is whole and marked as complete.", group=TAKE
    )


GIVEN = StepOptions
# Options of other programs, and of `steps`.
OTHER_OPTIONS = {"--last": "Use --last-good for the last good step of a run."}
