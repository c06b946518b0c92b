"""What tests of the trunk ask of TorchScript archives too."""

from __future__ import annotations

import random
from pathlib import Path

from .attacks import FILES

ATTACKS = FILES


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.script.fuzzing import fuzz_scripts

    return fuzz_scripts(chance, place)


FUZZED = {"script": _fuzz}
