"""The checkpoints in `data`: what they hold, and how they are converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dist_checkpoint
from checkpoints import Run, ckptconv_here

DCP = Path(__file__).parent / "data"
MODEL = {"weight": torch.arange(32.0).reshape(8, 4), "bias": torch.arange(8.0), "count": torch.tensor(3)}


# Directories of checkpoints by name, with those that only read where another feature is there.
CASES = {path.name: path for path in sorted([*DCP.iterdir(), *DCP.parent.glob("with_*/data/*")])}


def checkpoint_of(case: str) -> Path:
    return CASES[case] / "checkpoint"


def copy_of(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(case), tmp_path / "checkpoint"))


def expected_of(case: str) -> dict[str, Any]:
    return json.loads((CASES[case] / "expected.json").read_text())  # type: ignore[no-any-return]


def converted(source: Path, *options: object) -> Run:
    run = ckptconv_here("dcp2safetensors", source, *options, "--no-fsync")
    assert run.code == 0, run.err
    return run


def refused(source: Path, output: Path, code: int, *options: object) -> str:
    """What is said of a checkpoint that is not converted."""
    said = ckptconv_here("dcp2safetensors", source, output, *options).refused(code)
    assert not output.exists()
    return said


def saved(directory: Path, *states: dict[str, torch.Tensor], model: Any = MODEL, files: int = 1) -> Path:
    """A checkpoint of `model` and of an optimizer that has these states of parameter 0, 1, …"""
    state = {number: {"step": torch.tensor(2.0), **own} for number, own in enumerate(states)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    whole = {"optimizer": optimizer, **({"model": model} if model else {})}
    writer = dist_checkpoint.FileSystemWriter(directory, thread_count=files)
    dist_checkpoint.save(whole, storage_writer=writer, no_dist=True)
    return directory
