"""What tests of the trunk ask of steps of Orbax too."""

from __future__ import annotations

from features.orbax.attacks import STEPS

ATTACKS = STEPS
