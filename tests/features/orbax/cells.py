"""What tests of the trunk ask of steps of Orbax too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from features.orbax.attacks import STEPS

ATTACKS = STEPS
# A step of a run, by what writes it to a directory.
_DATA = Path(__file__).parent / "data"
ONE_STEP: dict[str, Callable[[Path], Path]] = {
    f"Orbax, {name}": lambda step, path=path: Path(shutil.copytree(_DATA / path, step))
    for name, path in {
        "of its manager": "manager/checkpoint/run/10",
        "of several items": "manager-composite/checkpoint/run/3",
    }.items()
}
