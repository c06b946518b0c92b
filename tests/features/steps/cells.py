"""What tests of the trunk ask of `steps` too."""

from __future__ import annotations

from ckptconv.features.steps.options import STEPS

# Options of the command that no other has.
FLAGS = {"steps": (STEPS,)}
# Commands that print JSON, which their own tests look at.
PRINTED = {"steps"}
