"""What tests of the trunk ask of structure records too."""

from __future__ import annotations

from . import attacks

ATTACKS = [*attacks.FILES.values(), *attacks.SETS]
