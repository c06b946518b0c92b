"""The checkpoints in `data`: what they hold, and how they are converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from checkpoints import Run, ckptconv_here

DCP = Path(__file__).parent / "data"


def checkpoint_of(case: str) -> Path:
    return DCP / case / "checkpoint"


def copy_of(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(case), tmp_path / "checkpoint"))


def expected_of(case: str) -> dict[str, Any]:
    return json.loads((DCP / case / "expected.json").read_text())  # type: ignore[no-any-return]


def converted(source: Path, *options: object) -> Run:
    run = ckptconv_here("dcp2safetensors", source, *options, "--no-fsync")
    assert run.code == 0, run.err
    return run


def refused(source: Path, output: Path, code: int, *options: object) -> str:
    """What is said of a checkpoint that is not converted."""
    said = ckptconv_here("dcp2safetensors", source, output, *options).refused(code)
    assert not output.exists()
    return said
