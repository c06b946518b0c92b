"""Write checkpoints with a file for each rank: those of `data`, and any that torch's own DTensor describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import Run, ckptconv_here
from dtensors import playing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

RANKS = Path(__file__).parent / "data"
CASES = ("fsdp1_local", "fsdp1_sharded", "fsdp2_tp")
# Of these, those whose optimizer's states are stored by number.
NUMBERED = ("fsdp2_tp",)


def write(
    place: Path,
    mesh: Sequence[int],
    state: Callable[[DeviceMesh, int], Any],
    name: str = "model_rank{}.pt",
    names: Sequence[str] | None = None,
) -> Path:
    """Save what `state` makes on each rank of a mesh of this shape, and return the directory."""
    world = int(torch.tensor(mesh).prod())
    place.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with playing(rank, world):
            torch.save(
                state(init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names), rank), place / name.format(rank)
            )
    return place


def converted(source: Path, output: Path, *options: object) -> Run:
    run = ckptconv_here("pt2safetensors", source, output, *options, "--no-fsync")
    assert run.code == 0, run.err
    return run


def refused(source: Path, output: Path, code: int, *options: object) -> str:
    """What is said of a checkpoint that is not converted."""
    said = ckptconv_here("pt2safetensors", source, output, *options, "--no-fsync").refused(code)
    assert not output.exists()
    return said
