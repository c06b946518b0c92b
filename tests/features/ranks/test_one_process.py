"""The distributed tensors of a world of one process are whole in its file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import torch_containers
from compare import assert_same
from effort import every
from safetensors.torch import load_file

from ckptconv import convert


@pytest.fixture
def one_process() -> Iterator[Any]:
    """A world of one process, to make distributed tensors in."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@every("options", torch_containers().values(), ids=torch_containers())
def test_distributed_tensors_of_one_process_are_whole(
    options: dict[str, Any], one_process: Any, tmp_path: Path
) -> None:
    from torch.distributed._shard import sharded_tensor, sharding_spec
    from torch.distributed.tensor import Shard, distribute_tensor

    spread = distribute_tensor(torch.arange(8.0), one_process, [Shard(0)])
    sharded = sharded_tensor.rand(sharding_spec.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 4)
    for tensor in (spread, torch.nn.Parameter(spread), sharded):
        torch.save({"w": torch.ones(2), "d": [tensor]}, tmp_path / "x.pt", **options)
        whole = sharded.local_tensor() if tensor is sharded else spread.to_local()
        convert(tmp_path / "x.pt", tmp_path / "whole.safetensors")
        found = load_file(tmp_path / "whole.safetensors")
        assert_same({"d.0": whole, "w": torch.ones(2)}, {name: found[name] for name in sorted(found)})
