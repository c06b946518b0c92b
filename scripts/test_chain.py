"""Trains with DeepSpeed, on from there with FSDP2, with DeepSpeed again, and with torch alone.

    test_chain.py [--version 0.19.8] [--directory build/chain] [--only muon]

ZeRO-3 on four ranks trains; its checkpoint is converted for torch.distributed.checkpoint, from which FSDP2 on two ranks
trains on; what that saves becomes a universal checkpoint for ZeRO-1 on three ranks; what this saves becomes a step of
torch_checkpointing, from which torch trains on in one process. At each station, the weights and the optimizer's states
after loading must be those that were saved before, bit for bit. All steps see the same data on every rank: where all
stations compute alike, the end must be that of one ZeRO-3 run of as many steps, but for the rounding of means. The exit
code is 1 if it is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ports import free_port
from test_deepspeed import environment, started

ROOT = Path(__file__).resolve().parents[1]
STEPS = 2  # of each station
MOMENTUM, MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")


class Chain(NamedTuple):
    """What trains: matrices with Muon, or all with AdamW; whether the first layer is frozen; and the warning that comes
    with the universal checkpoint, where DeepSpeed loads that, but fails in the first step."""

    muon: bool = False
    frozen: bool = False
    warned: str = ""


CHAINS = {
    "adamw": Chain(),
    "adamw-frozen": Chain(frozen=True),
    "muon": Chain(muon=True, warned="fail in the first step with Muon"),
    "muon-frozen": Chain(muon=True, frozen=True, warned="fail in the first step with Muon"),
}


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


def model_of(chain: Chain) -> Model:
    torch.manual_seed(1)
    model = Model()
    model.layers[0].requires_grad_(not chain.frozen)
    return model


def by_muon(name: str, parameter: torch.Tensor) -> bool:
    """What DeepSpeed gives Muon: all matrices but embeddings."""
    return parameter.ndim > 1 and "embed" not in name


def data(step: int) -> torch.Tensor:
    return torch.randint(13, (4, 7), generator=torch.Generator().manual_seed(step))


def noted(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if int(os.environ["RANK"]) == 0:
        torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, path)


# -------------------------------------------------------------------------------------------------------- the stations


def zero(place: Path, name: str, chain: Chain) -> None:
    """Train with DeepSpeed: ZeRO-3 from the beginning, or ZeRO-1 from a universal checkpoint."""
    deepspeed = started()
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    model = model_of(chain)
    is_universal = name == "zero-1"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1 if is_universal else 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": is_universal},
    }
    trained = [(own, each) for own, each in model.named_parameters() if each.requires_grad]
    optimizer: Any
    if chain.muon:
        # As DeepSpeed makes it by its configuration, but for the kernel of Adam, which would be compiled.
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        config["zero_optimization"]["reduce_scatter"] = False
        for own, parameter in model.named_parameters():
            vars(parameter)["use_muon"] = by_muon(own, parameter)
        matrices = [each for own, each in trained if by_muon(own, each)]
        others = [each for own, each in trained if not by_muon(own, each)]
        muon = {"params": matrices, "use_muon": True, "lr": 0.01, "momentum": 0.95, "weight_decay": 0.01}
        adam = {"params": others, "use_muon": False, "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
        optimizer = MuonWithAuxAdam([muon, {**adam, "weight_decay": 0.01}])
    else:
        optimizer = torch.optim.AdamW([each for _, each in trained], lr=0.01, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def state() -> dict[str, torch.Tensor]:
        found = {}
        for own, parameter in engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            found[own] = safe_get_full_fp32_param(parameter)
            for key in MOMENTUM if chain.muon and getattr(parameter, "use_muon", False) else MOMENTS:
                found[f"{own}.{key}"] = safe_get_full_optimizer_state(parameter, key)
        return found

    first = 0
    if is_universal:
        engine.load_checkpoint(str(place / "universal"))
        noted(place / f"{name}.begun.pt", state())
        first = 2 * STEPS
        if chain.warned:
            engine.save_checkpoint(str(place / "zero-1"))
    failed = False
    for step in range(first, first + (3 * STEPS + STEPS if name == "straight" else STEPS)):
        try:
            engine.backward(engine(data(step)))
            engine.step()
        except Exception as error:
            print("failed in step", step, repr(error)[:300], flush=True)
            failed = True
            break
    if chain.warned and is_universal:
        assert failed, "DeepSpeed goes on: the warning is out of date"
        return
    assert not failed
    if name != "straight":
        engine.save_checkpoint(str(place / name))
    noted(place / f"{name}.pt", state())


def optimizers_of(model: torch.nn.Module, chain: Chain) -> list[torch.optim.Optimizer]:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    matrices = [each for name, each in trained.items() if chain.muon and by_muon(name, each)]
    others = [each for name, each in trained.items() if not (chain.muon and by_muon(name, each))]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=0.01, foreach=False)]
    return [torch.optim.Muon(matrices, lr=0.01), *found] if chain.muon else found


def torch_alone(place: Path, name: str, chain: Chain) -> None:
    """Train on with FSDP2, from a checkpoint of torch.distributed.checkpoint to another, or in one process from a step
    of torch_checkpointing."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = model_of(chain)
    if name == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = optimizers_of(model, chain)

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizers)}

    def plain() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for own, parameter in model.named_parameters():
            own_states = {key: value for each in optimizers for key, value in each.state.get(parameter, {}).items()}
            tensors = {own: parameter, **{f"{own}.{key}": value for key, value in own_states.items() if key != "step"}}
            if parameter.requires_grad:
                found |= {key: getattr(each, "full_tensor", lambda each=each: each)() for key, each in tensors.items()}
        return found

    target = state()
    if name == "fsdp2":
        load(target, checkpoint_id=str(place / "for-fsdp2"))
    else:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder

        config = CheckpointManager.Config.with_sync_save()
        config.items = {item: ItemSpec(resharder=DefaultResharder()) for item in ("model", "optimizer")}
        manager = CheckpointManager(config)
        asked = {"model": target["model"], "optimizer": target["optim"]}
        found = manager.load(str(place / "step-0"), asked, strict=True)
        manager.close()
        target = {"model": found["model"], "optim": found["optimizer"]}
    set_state_dict(model, optimizers, model_state_dict=target["model"], optim_state_dict=target["optim"])
    noted(place / f"{name}.begun.pt", plain())
    first = STEPS if name == "fsdp2" else (2 if chain.warned else 3) * STEPS
    for step in range(first, first + STEPS):
        model.zero_grad()
        model(data(step)).backward()
        for each in optimizers:
            each.step()
    noted(place / f"{name}.pt", plain())
    if name == "fsdp2":
        save(state(), checkpoint_id=str(place / "of-fsdp2"))


# ----------------------------------------------------------------------------------------------------- the conversions


def converted(*words: object) -> str:
    command = [sys.executable, "-m", "ckptconv", *map(str, words)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"ckptconv {' '.join(map(str, words))} failed: {run.stderr}")
    return run.stdout + run.stderr


KEYS = "--model-key", "model", "--optimizer-key", "optim", "--chunks", 2, "--verify"


def for_fsdp2(place: Path) -> str:
    return converted("safetensors2dcp", place / "zero-3", place / "for-fsdp2", "--states", place / "zero-3", *KEYS)


def for_zero_1(place: Path) -> str:
    (place / "universal").mkdir()
    return converted("convert", place / "of-fsdp2", "--universal", place / "universal" / "step", "--verify")


def for_torch(place: Path) -> str:
    words = place / "zero-1", place / "step-0", "--to", "torch-checkpointing", "--states", place / "zero-1"
    return converted("safetensors2dcp", *words, "--verify")


class Station(NamedTuple):
    """A run on so many ranks, and the conversion before it."""

    run: Callable[[Path, str, Chain], None]
    world: int
    converted: Callable[[Path], str] | None = None


STATIONS = {
    "zero-3": Station(zero, 4),
    "fsdp2": Station(torch_alone, 2, for_fsdp2),
    "zero-1": Station(zero, 3, for_zero_1),
    "torch": Station(torch_alone, 1, for_torch),
    "straight": Station(zero, 4),
}


def launch(python: Path, place: Path, chain: str, name: str, world: int) -> None:
    settings = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",  # Muon of DeepSpeed would be compiled
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [str(python), __file__, "--directory", str(place), "--run", name, "--only", chain]
    ranks = []
    for rank in range(world):
        with (place / f"{name}.{rank}.txt").open("w") as log:
            own = {**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    if sum(process.wait() != 0 for process in ranks):
        raise SystemExit(f"{name} failed: see {place}/{name}.*.txt")


def faults(python: Path, place: Path, name: str) -> int:
    """Run a chain, and say what is not as it was saved."""
    chain, wrong, before = CHAINS[name], 0, ""

    def compared(what: str, one: str, other: str, within: bool = False) -> int:
        found, expected = (torch.load(place / f"{each}.pt") for each in (one, other))
        left = [each for each in {**expected, **found} if each not in found or each not in expected
                or not (torch.allclose if within else torch.equal)(found[each], expected[each])]  # fmt: skip
        how = "but for rounding" if within else "bit for bit"
        print(f"{name}: {what}: {len(expected) - len(left)} of {len(expected)} tensors, {how}", *left[:4], flush=True)
        return len(left)

    for own, station in STATIONS.items():
        if own == "straight" and chain.muon:
            continue  # DeepSpeed's Muon and torch's round differently
        told = station.converted(place) if station.converted else ""
        if own == "zero-1" and chain.warned and chain.warned not in told:
            print(f"{name}: nothing warns of what ZeRO-1 cannot do: {told}")
            wrong += 1
        launch(python, place, name, own, station.world)
        if before and own != "straight":
            wrong += compared(f"{own} begins with what {before} left", f"{own}.begun", before)
        before = before if own == "zero-1" and chain.warned else own
    # The mean of three ranks' equal gradients rounds.
    end = 0 if chain.muon else compared("the end is that of the straight run", "torch", "straight", within=True)
    return wrong + end


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--version", default="", help="of DeepSpeed; default: the latest")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "chain")
    parser.add_argument("--only", default="", help="one chain of: " + ", ".join(CHAINS))
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = options.directory.resolve()
    if options.run:
        STATIONS[options.run].run(place, options.run, CHAINS[options.only])
        os._exit(0)  # threads of process groups may not want to end
    python = environment(options.version)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "torch_checkpointing"], check=True)
    wrong = 0
    for name in [options.only] if options.only else CHAINS:
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).mkdir(parents=True)
        wrong += faults(python, place / name, name)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
