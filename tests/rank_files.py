"""Write checkpoints with a file for each rank: those of tests/data/ranks, and any that torch's own DTensor describes.

torch's `fake` backend plays one rank after the other in this process: it knows the mesh, and sends nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import DATA, Run, ckptconv_here
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = DATA / "ranks"
CASES = ("fsdp1_local", "fsdp1_sharded", "fsdp2_tp")


@contextlib.contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    """Be `rank` of `world` ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


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


def placed(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> torch.Tensor:
    """This rank's part of a tensor, as torch cuts it."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def converted(source: Path, output: Path, *options: object) -> Run:
    run = ckptconv_here("pt2safetensors", source, output, *options, "--no-fsync")
    assert run.code == 0, run.err
    return run


def refused(source: Path, output: Path, code: int, *options: object) -> str:
    """What is said of a checkpoint that is not converted."""
    said = ckptconv_here("pt2safetensors", source, output, *options, "--no-fsync").refused(code)
    assert not output.exists()
    return said
