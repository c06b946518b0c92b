"""What tests of the trunk ask of `thin` too."""

from __future__ import annotations

from ckptconv.features.thin.options import THIN

# Options of the command that no other has.
FLAGS = {"thin": (THIN,)}
# Commands that print JSON, which their own tests look at.
PRINTED = {"thin"}
