"""What tests of the trunk ask of `steps` too."""

from __future__ import annotations

from typing import Any

from ckptconv.features.steps.command import STEPS
from ckptconv.options.table import COMMAND

# Options of the command that no other has.
FLAGS = {"steps": ({name: option for name, option in STEPS.items() if name not in COMMAND},)}
# Commands that print JSON, which their own tests look at.
PRINTED = {"steps"}
# A command that writes nothing.
READING = {"steps"}
# Of the option of conversions: its default, a value, and how that may be written. It says which checkpoint is read, and
# knows no kind of output.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"last_good": (False, True, [True])}
OF_INPUTS = {"last_good"}
SAID = [
    ("steps none --all", 2, "There is no option --all. Without --last, steps lists every step."),
    ("steps none --last-good", 2, "There is no option --last-good. Use --last: it prints only the path of the last"),
]
OTHER_OPTIONS = {
    "--last": "Use --last-good for the last good step of a run.",
    "--step": "Give the directory of the step",
}
