"""The commands of features."""

from __future__ import annotations

# The module of each, which has the command or the group of commands as `command`, and what else people call them,
# {command: words}, as `OTHER_WORDS`. It is imported when the command is called.
COMMANDS: dict[str, str] = {
    "average": "ckptconv.features.average.command",
    "rows": "ckptconv.features.rows.command",
}
