"""What tests of the trunk ask of `thin` too."""

from __future__ import annotations

from ckptconv.features.thin.options import THIN
from ckptconv.options.table import COMMAND

# Words that people use for it.
MEANT = {"rm": "thin"}
# Options of the command that no other has.
FLAGS = {"thin": ({name: option for name, option in THIN.items() if name not in COMMAND},)}
# Commands that print JSON, which their own tests look at.
PRINTED = {"thin"}
# A command that writes no path that it is given; its own tests look at what it removes.
READING = {"thin"}
