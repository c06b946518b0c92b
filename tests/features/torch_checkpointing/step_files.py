"""What steps of torch_checkpointing are made of."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def dtensor(shape: tuple[int, ...], *placements: dict[str, Any], mesh: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """What metadata says of a DTensor of float32."""
    ranks = tuple(range(math.prod(mesh)))
    spec = {"device_type": "cpu", "mesh_shape": mesh, "mesh_data": ranks, "mesh_dim_names": None}
    data = {
        "global_shape": list(shape),
        "dtype": "torch.float32",
        "stride": [1],
        "mesh_spec": spec,
        "placements": list(placements),
    }
    return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}


SHARD, REPLICA = {"type": "Shard", "dim": 0}, {"type": "Replicate"}


def write_step(step: Path, state: dict[str, torch.Tensor], world: int) -> Path:
    """Write a step whose model is in safetensors: in shards of rows, and what has no rows on each rank."""
    step.mkdir(parents=True)
    for rank in range(world):
        own = {name: each.chunk(world)[rank].contiguous() if each.dim() else each for name, each in state.items()}
        save_file(own, step / f"model_{rank}.safetensors")
    tensors = {
        f'["{name}"]': [dtensor(tuple(each.shape), SHARD if each.dim() else REPLICA, mesh=(world,))]
        for name, each in state.items()
    }
    kind = {"type": "SafetensorsSerialization"}
    files = {rank: {"file_path": f"model_{rank}.safetensors", "serialization_format": kind} for rank in range(world)}
    item = {"nested_path_to_metadata": tensors, "rank_to_layout_info": files}
    told = {"version": "2.0", "world_size": world, "metadata": {"model": item}}
    (step / "metadata.pkl").write_bytes(pickle.dumps(told))
    return step
