"""A call of the program, for the report of a failure."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes longer to import than everything that help needs
if TYPE_CHECKING:
    from typing import Any


class Call:
    """A call of the program, as far as it is known, for the report of a failure: its command and first argument.

    `is_process`: the process ends with it.
    """

    def __init__(self, is_process: bool) -> None:
        self.is_process = is_process
        self.command: str | None = None
        self.input: str | None = None

    def note(self, path: str, command: Any, args: list[str]) -> None:
        """Take the command that `path` names, and its input from `args`, the words after its name."""
        if not hasattr(command, "commands"):
            self.command = path.partition(" ")[2]
            self.input = _first_argument(command.params, args)


def _first_argument(parameters: list[Any], args: list[str]) -> str | None:
    """Return the first of `args` that is not an option or its value; None without one, or after an unknown option."""
    options = {name: parameter for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    words = iter(args)
    for word in words:
        if word == "--":
            return next(words, None)
        if word == "-" or not word.startswith("-"):
            return word
        name, equals, _ = word.partition("=")
        option = options.get(name.replace("_", "-"))
        if option is None:
            return None
        if not option.is_flag and not equals:
            next(words, None)
    return None
