"""The option of conversions about a rule for make."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH
from ckptconv.options.option import Given, option


class RuleOptions(Given):
    """The place for the rule."""

    depfile: str = option(
        PATH,
        "Write a rule for make to FILE, with the local files that the output needs. Its target is the output file; in "
        "a directory, the index, or the only file of weights.",
        metavar="FILE",
        group=OUTPUT,
    )


GIVEN = RuleOptions
