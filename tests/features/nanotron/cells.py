"""What tests of the trunk ask of steps of nanotron too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _written(step: Path) -> Path:
    from .test_nanotron import written

    return written(step)


# A step of a run, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {"nanotron": _written}
