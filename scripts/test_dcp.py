"""Trains on from checkpoints that we write for torch.distributed.checkpoint, on one, two and three ranks.

    test_dcp.py [--directory build/dcp]

Two ranks train a model with FSDP2 and AdamW on the CPU, save it with dcp.save, and train on. The checkpoint becomes
safetensors and back again, in the layouts of torch's tutorials and of torchtitan, and as safetensors shards. dcp.load
reads these into FSDP2 on one, two and three ranks, and into DDP; so do accelerate, Lightning and torch_checkpointing,
where they are installed, and dcp.load with our own reader, from what was saved and from the safetensors.
Other optimizers are saved by async_save. Every tensor must be the one that was saved, bit for bit; after as many
further steps, the one that the first run has then. The exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
STEPS = 2
WORLDS = (1, 2, 3)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """Odd shapes, tensors of one element, and a buffer that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.embedding(words)
        for layer in self.layers:
            found = torch.relu(layer(found)) + found
        made: torch.Tensor = self.head(self.norm(found)) * self.scale
        return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-2, betas=(0.8, 0.95), weight_decay=0.1)


# Optimizers with states of other names, or of some parameters only.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5, centered=True),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "muon": lambda model: torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], lr=1e-2),
}


def built(
    seed: int,
    wrap: Callable[[Model], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Model())
    return model, optimizer(model)


def sharded(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for each in model.modules():
        # Gradients are added up, and only the first rank has any: so the sum does not depend on the number of ranks.
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
    return model


def replicated(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    share = float(dist.get_rank() == 0)
    if isinstance(model, DistributedDataParallel):
        share *= dist.get_world_size()  # it divides by the number of ranks, here by two, which is exact
    for step in range(first, first + STEPS):
        torch.manual_seed(step)
        words, wanted = torch.randint(13, (4, 7)), torch.randn(4, 7, 5)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(words), wanted) * share
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a state dict, whole ones, by dotted name. All ranks have to take part."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, torch.Tensor):
        yield name, (tree.full_tensor() if isinstance(tree, DTensor) else tree).detach().clone()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's states by name."""
    both = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)["state"]}
    return dict(leaves(both))


# ------------------------------------------------------------------------------------------------- what the ranks do


def first_run(directory: Path) -> None:
    trained(directory, adamw, save)
    for name, optimizer in OPTIMIZERS.items():
        trained(directory / name, optimizer, save_beside)


def save_beside(state: dict[str, Any], **where: Any) -> None:
    made = async_save(state, **where)
    assert isinstance(made, Future)
    made.result()


def trained(directory: Path, of: Callable[[nn.Module], torch.optim.Optimizer], saving: Callable[..., object]) -> None:
    """Train, save, and train on; note what the weights and states are then and there."""
    model, optimizer = built(0, sharded, of)
    model.seen += torch.tensor([3, 1, 4])  # type: ignore[operator]
    train(model, optimizer, 0)
    saved = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    saving(saved, checkpoint_id=directory / "saved")
    before = state_of(model, optimizer)
    train(model, optimizer, STEPS)
    after = state_of(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"before": before, "after": after}, directory / "notes.pt")


def as_in_tutorials(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """{"model": …, "optim": …}"""
    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    load({"model": weights, "optim": states}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def as_in_torchtitan(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """The weights at the top, and the optimizer with one key for each state of a parameter."""
    weights = get_model_state_dict(model)
    states = get_optimizer_state_dict(model, optimizer, options=FLAT)
    load({**weights, "optimizer": states}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=FLAT)


def weights_alone(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Safetensors shards, by torch's reader for these."""
    weights = get_model_state_dict(model)
    load(weights, storage_reader=HuggingFaceStorageReader(str(directory)))
    set_model_state_dict(model, weights)


def as_in_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """The functions with which Accelerator.load_state loads FSDP2; an Accelerator has FSDP on accelerators alone."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

    PartialState(cpu=True)  # its messages ask for that
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    facts = {"is_fsdp2": True, "process_index": dist.get_rank(), "num_processes": dist.get_world_size()}
    accelerator = SimpleNamespace(**facts, wait_for_everyone=dist.barrier)
    load_fsdp_model(plugin, accelerator, model, str(directory))
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory))


def by_reader(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, states: Path) -> None:
    """Any checkpoint as it lies, by our reader."""
    from ckptconv import DistributedReader

    weights, own = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    names: dict[str, Any] = {"model_key": "model", "optimizer_key": "optim", "optimizer": str(states)}
    load({"model": weights, "optim": own}, storage_reader=DistributedReader(path, **names))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=own)


def of_itself(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """What dcp.save wrote, by our reader."""
    by_reader(model, optimizer, directory.parent / "saved", directory.parent / "saved")


def of_safetensors(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Safetensors of weights and states, by our reader."""
    by_reader(model, optimizer, directory.parent / "model", directory.parent / "optimizer")


def as_steps(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """A step of torch_checkpointing, by its own library."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder

    config = CheckpointManager.Config.with_sync_save()
    config.items = {name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optimizer")}
    manager = CheckpointManager(config)
    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    found = manager.load(str(directory / "step-0"), {"model": weights, "optimizer": states}, strict=True)
    manager.close()
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def as_in_lightning(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """The function with which Fabric and the Trainer load what ModelParallelStrategy saves."""
    from lightning.fabric.strategies.model_parallel import _load_checkpoint

    state = {"model": model, "optimizer": optimizer, "step": 0}
    _load_checkpoint(directory, state)
    assert state["step"] == STEPS


LOADERS: dict[str, Callable[..., None]] = {
    "accelerate": as_in_accelerate,
    "reader": of_itself,
    "reader-safetensors": of_safetensors,
    "torch_checkpointing": as_steps,
    "lightning": as_in_lightning,
    "tutorial": as_in_tutorials,
    "tutorial-ddp": as_in_tutorials,
    "like": as_in_tutorials,
    "torchtitan": as_in_torchtitan,
    "shards": weights_alone,
}


# Where the checkpoint of a case is, if its name is not that of the case.
PLACES = {"tutorial-ddp": "tutorial", "lightning": "lightning.ckpt"}


def other_optimizers(directory: Path) -> None:
    for name, optimizer in OPTIMIZERS.items():
        second_run(directory / name, "tutorial", optimizer)


def second_run(directory: Path, case: str, of: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> None:
    model, optimizer = built(1, replicated if case.endswith("ddp") else sharded, of)
    LOADERS[case](model, optimizer, directory / PLACES.get(case, case))
    notes = torch.load(directory / "notes.pt")
    weights_only = case == "shards"
    compare(
        dict(leaves({"model": get_model_state_dict(model)})) if weights_only else state_of(model, optimizer),
        notes["before"],
    )
    if not weights_only:
        train(model, optimizer, STEPS)
        compare(state_of(model, optimizer), notes["after"])


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    missing = {name for name in wanted if name.startswith("model.") or any(key.startswith("optim.") for key in found)}
    assert missing == found.keys(), missing ^ found.keys()
    for name, tensor in found.items():
        one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, wanted[name]))
        assert torch.equal(one, other), f"{name}: {tensor.flatten()[:4]} and not {wanted[name].flatten()[:4]}"


def rank(number: int, world: int, job: Callable[[], None], meeting: str, errors: Any) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=world)
        job()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put(traceback.format_exc())
        raise


def run(world: int, job: Callable[[], None]) -> str:
    """Run `job` on so many ranks; return the error of one of them, "" if there was none."""
    spawn = torch.multiprocessing.get_context("spawn")
    errors = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        arguments = world, job, f"{place}/meeting", errors
        ranks = [spawn.Process(target=rank, args=(number, *arguments)) for number in range(world)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    if not errors.empty():
        return str(errors.get())
    return "" if all(each.exitcode == 0 for each in ranks) else "a rank ended"


# ------------------------------------------------------------------------------------------------------- the program


def ckptconv(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "ckptconv", *map(str, arguments), "--quiet"], check=True, cwd=ROOT)


def convert(at: Path) -> None:
    """Make safetensors of what was saved, and of these everything that is loaded."""
    for place in (at, *(at / name for name in OPTIMIZERS)):
        ckptconv("dcp2safetensors", place / "saved", place / "model", "--optimizer", place / "optimizer")
        given = place / "model", place / "tutorial", "--states", place / "optimizer"
        keys = "--model-key", "model", "--optimizer-key", "optim"
        ckptconv("safetensors2dcp", *given, *keys, "--chunks", 3, "--verify")
    back = "safetensors2dcp", at / "model"
    states = "--states", at / "optimizer"
    ckptconv(*back, at / "torchtitan", *states, "--flat-optimizer", "--chunks", 2, "--verify")
    ckptconv(*back, at / "like", *states, "--like", at / "saved", "--verify")
    ckptconv(*back, at / "shards", "--to", "dcp-hf", "--chunks", 4, "--verify")
    ckptconv(*back, at / "accelerate", "--to", "accelerate", *states, "--chunks", 3, "--verify")
    step = at / "torch_checkpointing" / "step-0"
    ckptconv(*back, step, "--to", "torch-checkpointing", *states, "--chunks", 2, "--verify")
    keys = "--model-key", "model", "--optimizer-key", "optimizer"
    ckptconv(*back, at / "lightning.ckpt", *states, *keys, "--chunks", 2, "--verify")
    torch.save({"step": STEPS}, at / "lightning.ckpt" / "meta.pt")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "dcp")
    at: Path = parser.parse_args().directory.resolve()
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    failed = run(2, functools.partial(first_run, at))
    if failed:
        print(failed)
        return 1
    convert(at)
    wrong = 0
    for package in ("accelerate", "lightning", "torch_checkpointing"):
        if not importlib.util.find_spec(package):
            print(f"{package} is not installed: not tried")
            del LOADERS[package]
    cases = {case: functools.partial(second_run, at, case) for case in LOADERS}
    for case, job in {**cases, "other optimizers": functools.partial(other_optimizers, at)}.items():
        for world in (2,) if case.endswith(("ddp", "optimizers")) else WORLDS:
            error = run(world, job)
            wrong += bool(error)
            print(f"{case} on {world}: {'wrong' if error else 'right'}", flush=True)
            if error:
                print(error)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
