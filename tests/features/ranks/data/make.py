"""Make the checkpoints here: `python make.py` trains small models in several processes, with gloo on a CPU.

Each rank saves its own state dicts with torch.save. `expected.safetensors` and `optimizer.safetensors` are what the
live model and optimizer held, gathered by torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CPU = torch.device("cpu")
HERE = Path(__file__).parent


class Model(nn.Module):
    """Uneven shapes, a tied weight, a scalar and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5, bias=False)
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("ids", torch.arange(5))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.down(self.up(x).relu()))
        return (self.head(x) + self.tied(x)) * self.scale


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def expect(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save what the live model and optimizer hold."""
    whole = StateDictOptions(full_state_dict=True)
    weights, states = (
        get_model_state_dict(model, options=whole),
        get_optimizer_state_dict(model, optimizer, options=whole),
    )
    if dist.get_rank() == 0:
        flat = {f"{name}.{key}": value for name, state in states["state"].items() for key, value in state.items()}
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in weights.items()}, place / "expected.safetensors"
        )
        save_file({name: tensor.clone().contiguous() for name, tensor in flat.items()}, place / "optimizer.safetensors")


def fsdp1(place: Path, kind: StateDictType) -> None:
    model = Model()
    model.up = FullyShardedDataParallel(model.up, use_orig_params=True, device_id=CPU)  # type: ignore[assignment]
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)  # type: ignore[assignment]
    optimizer = trained(model)
    with FullyShardedDataParallel.state_dict_type(model, kind):
        state = model.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    rank = dist.get_rank()
    torch.save(state, place / "checkpoint" / f"model_rank{rank}.pt")
    torch.save(states, place / "checkpoint" / f"optim_rank{rank}.pt")
    expect(place, model, optimizer)


def fsdp2(place: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = trained(model)
    rank = dist.get_rank()
    torch.save(model.state_dict(), place / "checkpoint" / f"model_world_size_4_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), place / "checkpoint" / f"optim_world_size_4_rank_{rank}.pt")
    extra = {"lr_scheduler": {"last_epoch": 2, "_last_lr": [0.01]}, "rng": {"cpu": torch.zeros(3, dtype=torch.uint8)}}
    torch.save(extra, place / "checkpoint" / f"extra_state_world_size_4_rank_{rank}.pt")
    expect(place, model, optimizer)


CASES: dict[str, tuple[int, Any]] = {
    "fsdp1_sharded": (2, lambda place: fsdp1(place, StateDictType.SHARDED_STATE_DICT)),
    "fsdp1_local": (2, lambda place: fsdp1(place, StateDictType.LOCAL_STATE_DICT)),
    "fsdp2_tp": (4, fsdp2),
}


def run(rank: int, name: str, world: int, root: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    place = Path(root) / name
    (place / "checkpoint").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    CASES[name][1](place)
    dist.destroy_process_group()


if __name__ == "__main__":
    root = sys.argv[1] if len(sys.argv) > 1 else str(HERE)
    for name, (world, _) in CASES.items():
        mp.spawn(run, (name, world, root), nprocs=world)  # type: ignore[no-untyped-call]
