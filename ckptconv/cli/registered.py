"""The commands of features."""

from __future__ import annotations

# The module of each, which has the command or the group of commands as `command`, what else people call them,
# {command: words}, as `OTHER_WORDS`, and what is said of options of other programs, if anything, as `OTHER_OPTIONS`. It
# is imported when the command is called.
COMMANDS: dict[str, str] = {
    "average": "ckptconv.features.average.command",
    "merge": "ckptconv.features.merge.command",
    "patch": "ckptconv.features.deltas.command",
    "rows": "ckptconv.features.rows.command",
}
