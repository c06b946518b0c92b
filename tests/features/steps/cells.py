"""What tests of the trunk ask of `steps` too."""

from __future__ import annotations

from ckptconv.features.steps.options import STEPS
from ckptconv.options.table import COMMAND

# Options of the command that no other has.
FLAGS = {"steps": ({name: option for name, option in STEPS.items() if name not in COMMAND},)}
# Commands that print JSON, which their own tests look at.
PRINTED = {"steps"}
# A command that writes nothing.
READING = {"steps"}
