"""Trains with DeepSpeed, then with FSDP2, then with DeepSpeed again, and beside it without a change.

    test_chain.py [--version 0.19.8] [--directory build/chain]

ZeRO-3 on four ranks trains; its checkpoint is converted for torch.distributed.checkpoint, from which FSDP2 on two ranks
trains on; what that saves becomes a universal checkpoint, from which ZeRO-2 on one rank trains on. All steps see the
same data on every rank, so that the mean of the gradients is exact. The weights and the optimizer's states must be
those of one ZeRO-3 run of as many steps, bit for bit. The exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from test_deepspeed import environment, free_port, started

ROOT = Path(__file__).resolve().parents[1]
STEPS = 2  # of each of the three runs
ZERO_3, FSDP2, ZERO_2, STRAIGHT = "zero-3", "fsdp2", "zero-2", "straight"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 5, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.embedding(words)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        out: torch.Tensor = self.head(self.norm(h)).square().mean()
        return out


def data(step: int) -> torch.Tensor:
    return torch.randint(13, (4, 7), generator=torch.Generator().manual_seed(step))


def noted(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if int(os.environ["RANK"]) == 0:
        torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, path)


def zero(place: Path, kind: str) -> None:
    """Train with DeepSpeed, from the beginning or from what FSDP2 left."""
    deepspeed = started()
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2 if kind == ZERO_2 else 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if kind == ZERO_2:
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    first, last = (2 * STEPS, 3 * STEPS) if kind == ZERO_2 else (0, STEPS if kind == ZERO_3 else 3 * STEPS)
    if kind == ZERO_2:
        engine.load_checkpoint(str(place / "universal"))
    for step in range(first, last):
        engine.backward(engine(data(step)))
        engine.step()
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
    if kind == ZERO_3:
        engine.save_checkpoint(str(place / "zero"))
    noted(place / f"{kind}.pt", found)


def fsdp2(place: Path) -> None:
    """Train on with FSDP2, from a checkpoint of torch.distributed.checkpoint to another."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    load(state, checkpoint_id=str(place / "for-fsdp2"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for step in range(STEPS, 2 * STEPS):
        optimizer.zero_grad()
        model(data(step)).backward()
        optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=str(place / "of-fsdp2"))


def launch(python: Path, place: Path, kind: str, world: int) -> None:
    settings = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [str(python), __file__, "--directory", str(place), "--run", kind]
    ranks = []
    for rank in range(world):
        with (place / f"{kind}.{rank}.txt").open("w") as log:
            own = {**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    if sum(process.wait() != 0 for process in ranks):
        raise SystemExit(f"{kind} failed: see {place}/{kind}.*.txt")


def converted(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "ckptconv", *map(str, words), "--quiet"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--version", default="", help="of DeepSpeed; default: the latest")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "chain")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = options.directory.resolve()
    if options.run:
        fsdp2(place) if options.run == FSDP2 else zero(place, options.run)
        os._exit(0)  # threads of process groups may not want to end
    python = environment(options.version)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    launch(python, place, ZERO_3, 4)
    keys = "--model-key", "model", "--optimizer-key", "optim", "--chunks", 2, "--verify"
    converted("safetensors2dcp", place / "zero", place / "for-fsdp2", "--optimizer", place / "zero", *keys)
    launch(python, place, FSDP2, 2)
    (place / "universal").mkdir()
    converted("convert", place / "of-fsdp2", "--universal", place / "universal" / "step", "--verify")
    launch(python, place, ZERO_2, 1)
    launch(python, place, STRAIGHT, 4)
    found, expected = (torch.load(place / f"{kind}.pt") for kind in (ZERO_2, STRAIGHT))
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    print(f"{len(expected) - len(wrong)} of {len(expected)} tensors are those of the straight run, bit for bit")
    for name in wrong:
        print(f"    {name}: by up to {(found[name] - expected[name]).abs().max()}")
    return 1 if wrong or found.keys() != expected.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
