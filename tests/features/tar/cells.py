"""What tests of the trunk ask of torch's tar archives too."""

from __future__ import annotations

import random
from pathlib import Path

from . import attacks

ATTACKS = [*attacks.FILES, *attacks.DIRECTORIES]


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.tar.fuzzing import fuzz_tars

    return fuzz_tars(chance, place)


FUZZED = {"tar": _fuzz}
