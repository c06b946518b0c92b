"""The option of conversions about a rule for make."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH
from ckptconv.options.option import Given, option


class RuleOptions(Given):
    """The place for the rule."""

    depfile: str = option(
        PATH,
        "Write a Makefile rule to FILE, listing the local files on which the output depends. Its target is the "
        "output file or, in a directory, the index or the only weights file.",
        metavar="FILE",
        group=OUTPUT,
    )


GIVEN = RuleOptions
# Options of other programs.
OTHER_OPTIONS = {
    "--skip-existing --if-needed --no-overwrite": "Use --no-clobber, which replaces nothing, or --depfile with make.",
}
