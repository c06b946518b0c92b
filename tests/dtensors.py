"""DTensors without a cluster: torch's `fake` backend plays one rank after the other in this process. It knows the mesh,
and sends nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    """Be `rank` of `world` ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def placed(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> torch.Tensor:
    """This rank's part of a tensor, as torch cuts it."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
