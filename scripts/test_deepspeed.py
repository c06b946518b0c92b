"""Converts what a real DeepSpeed has just saved, and asks the live model who is right.

    test_deepspeed.py [--version 0.19.8] [--rounds 12] [--seed 0] [--kind resumed]

In an environment of its own, `build/deepspeed-VERSION`, a release of DeepSpeed trains tiny models for a few steps on
two or three CPU ranks: stages 0 to 3, random shapes and groups, frozen and tied parameters, every precision, experts, a
pipeline, tensor parallelism. It saves, and notes the live master weights, buffers and optimizer states. Then its own
converter and ours read the checkpoints, and both are compared with the notes bit for bit; and universal checkpoints
that we write are compared with those of its ds_to_universal. Universal checkpoints that we make of other checkpoints
(of safetensors, torch.save and torch.distributed.checkpoint) are loaded, and trained on beside a run that began with
the same weights, or went on with the same optimizer. The exit code is 1 if ours is wrong anywhere, so that a new
release can be checked in minutes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from ports import free_port

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
PATIENCE = 180  # seconds in which a case must be done; most take two, but a launch takes ten, and others may be busy
CASES, PENDING, NOTES, LOG = "cases.json", "pending.json", "notes.{}.pt", "log.{}.txt"
FAILED = "not_trained.txt"
OURS, THEIRS = "ours.universal", "theirs.universal"
RIGHT = "right"
# What a case of resuming begins with: its weights and optimizer, and our universal checkpoint of them.
BEGUN, BEGIN = "begun.pt", "begin.universal"
# Releases from which ZeRO-3 loads the universal checkpoints of the other stages; and leaves hyperparameters alone that
# a universal checkpoint does not name.
ANY_STAGE, NAMED_ONLY = (0, 19, 4), (0, 18, 0)

Case: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, torch.Tensor]


# ----------------------------------------------------------------------------------------------------------- the cases


def make_cases(rounds: int, seed: int, release: tuple[int, ...]) -> list[Case]:
    """Random models without model parallelism, then one of every other kind; then trainings that `release` resumes."""
    dice = random.Random(seed)
    cases = [_dense(dice, number) for number in range(rounds)]
    parallel = [("moe", 1, 2), ("moe", 2, 2), ("moe", 1, 4), ("moe", 2, 4), ("pipeline", 1, 2), ("pipeline", 1, 4)]
    parallel += [("autotp", stage, 2) for stage in (1, 2, 3)] + [("autotp", 2, 4)]
    cases.extend(
        {"kind": kind, "stage": stage, "world": world, "precision": "fp32" if kind == "autotp" else "bf16", "zero": {}}
        for kind, stage, world in parallel
    )
    cases.append({**cases[rounds], "stage": 2, "together": True})  # one rank has all experts
    cases.extend(_resumed(release))
    for number, case in enumerate(cases):
        marks = sorted(key for key, value in case.items() if value is True)
        case["seed"] = seed * 1000 + number
        case["name"] = "_".join(
            [f"{number:02d}", case["kind"], f"z{case['stage']}", case["precision"], f"w{case['world']}", *marks]
        )
    return cases


def _resumed(release: tuple[int, ...]) -> Iterator[Case]:
    """Universal checkpoints made of each kind of source, for each stage, on two ranks and on three."""
    for number, (source, stage, own) in enumerate(
        [(source, stage, False) for source in ("hf", "pt", "dcp") for stage in (1, 2, 3)]
        + [("hf", 1, False), ("hf", 3, True), ("dcp", 3, True), ("hf", 2, True)]
    ):
        yield {
            "kind": "resumed",
            "from": source,
            "stage": stage,
            "own_stage": own or (stage == 3 and release < ANY_STAGE),
            "world": 2 + number % 2,
            "precision": "bf16" if source == "hf" else "fp32",
            "bf16_optimizer": number == 9,
            "zero": {"stage3_param_persistence_threshold": 0} if stage == 3 else {},
            "widths": [3 + number, 5, 2],
            # Under ZeRO-3, DeepSpeed has all groups share a counter of steps that it loads, and counts them together.
            "groups": 2 if source == "hf" and stage != 3 else 1,
            "hyperparameters_lost": stage == 3 and source == "hf" and release < NAMED_ONLY,
            "tied": number % 2 == 0,
            "empty": False,
            "wide": False,
        }


def _dense(dice: random.Random, number: int) -> Case:
    stage = number % 4 if number < 8 else dice.choice([1, 1, 2, 2, 3, 3])
    precision = dice.choice(["bf16", "bf16", "fp16", "fp32"])
    zero: dict[str, Any] = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    case: Case = {
        "kind": "dense",
        "stage": stage,
        "world": dice.choice([2, 2, 3]),
        "precision": precision,
        "zero": zero,
        "widths": [dice.randint(1, 9) for _ in range(dice.randint(2, 5))],
        "groups": 1 if stage == 0 else dice.randint(1, 3),
        "tied": dice.random() < 0.5,
        "frozen": dice.random() < 0.5 and stage > 0,
        "empty": dice.random() < 0.3 and stage in (1, 2),  # with ZeRO-3 DeepSpeed cannot train them
        "sgd": dice.random() < 0.2,
        "wide": dice.random() < 0.2,
        "bf16_optimizer": False,
        "exclude_frozen": False,
    }
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": dice.choice([10, 100, 10**9])}
    if stage in (1, 2):
        choice = dice.choice(["", "round_robin", "align", "elastic", "bf16_optimizer"])
        if choice == "bf16_optimizer" and precision == "bf16" and stage == 1:
            case["bf16_optimizer"] = True
            case["empty"] = False
        elif choice in ("round_robin", "align", "elastic"):
            keys = {"round_robin": "round_robin_gradients", "align": "parameter_alignment"}
            zero[keys.get(choice, "elastic_checkpoint")] = case[choice] = True
    case["exclude_frozen"] = case["frozen"] and dice.random() < 0.25
    case["stream"] = dice.random() < 0.15
    case["offload"] = stage > 0 and not case["bf16_optimizer"] and dice.random() < 0.25
    if case["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    return case


def config_of(case: Case) -> dict[str, Any]:
    """The DeepSpeed configuration of a case."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 if case["kind"] == "pipeline" else 1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"], **case["zero"]},
    }
    if case["precision"] != "fp32":
        config[case["precision"]] = {"enabled": True}
    if case["precision"] == "fp16":
        config["fp16"]["initial_scale_power"] = 4
    if case.get("stream"):
        config["checkpoint"] = {"checkpoint_serialization": False}
    if case.get("offload"):
        config["zero_force_ds_cpu_optimizer"] = False  # it would have to be compiled
    if case.get("bf16_optimizer"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if case["kind"] == "autotp":
        specs = [
            {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        ]
        partition = {"use_default_specs": False, "layer_specs": specs}
        config["tensor_parallel"] = {"autotp_size": 2, "partition_config": partition}
    return config


# ------------------------------------------------------------------------------------------------ training (one rank)


class Net(torch.nn.Module):
    """Parameters of every sort: matrices, vectors, single values, tied, without elements; and buffers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        nn, widths = torch.nn, case["widths"]
        self.scale = nn.Parameter(torch.randn(1, 1))
        self.one = nn.Parameter(torch.randn(1))
        if case["empty"]:
            self.void = nn.Parameter(torch.zeros(0, 3))
        self.emb = nn.Embedding(11, widths[0])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, [*widths[1:], widths[0]], strict=True))
        self.norm = nn.LayerNorm(widths[0])
        self.head = nn.Linear(widths[0], 11, bias=False)
        if case["tied"]:
            self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False]))
        if case["wide"]:
            self.register_buffer("f64", torch.randn(3, dtype=torch.float64))
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("passing", torch.randn(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        out: torch.Tensor = self.head(self.norm(h) * self.scale + self.one).float().pow(2).mean()
        return out


def freeze(model: torch.nn.Module, dice: random.Random) -> list[str]:
    """Some parameters are not to be trained: their names."""
    names = [name for name, parameter in model.named_parameters() if parameter.numel() and "emb" not in name]
    frozen = dice.sample(names, max(1, len(names) // 3))
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return frozen


def grouped(model: torch.nn.Module, count: int) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = [trained[number::count] for number in range(count)]
    # A group of nothing but parameters without elements is none to DeepSpeed.
    parts = [part for part in parts if any(parameter.numel() for parameter in part)]
    return [{"params": part, "lr": 0.01 * (number + 1)} for number, part in enumerate(parts)]


def train_dense(case: Case, deepspeed: Any) -> tuple[Any, Tensors, Tensors]:
    model = Net(case)
    dice = random.Random(case["seed"])
    frozen = freeze(model, dice) if case["frozen"] else []
    groups = grouped(model, case["groups"])
    adam = torch.optim.AdamW(groups, lr=0.01)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9) if case["sgd"] else adam
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))
    for _ in range(3):
        loss = engine(torch.randint(11, (2, 4)))
        engine.backward(loss)
        engine.step()
    weights, states = note(engine, deepspeed, SGD if case["sgd"] else ADAM)
    if case["exclude_frozen"]:
        weights = {name: tensor for name, tensor in weights.items() if name not in frozen}
    return engine, weights, states


def train_moe(case: Case, deepspeed: Any) -> tuple[Any, Tensors, Tensors]:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    ranks = 1 if case.get("together") else 2  # that have all experts between them

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(5, 6)
            self.first = MoE(6, torch.nn.Linear(6, 6), num_experts=4, ep_size=ranks, k=1, min_capacity=1)
            self.second = MoE(6, torch.nn.Linear(6, 6), num_experts=2, ep_size=ranks, k=1, min_capacity=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.second(self.first(self.inner(x))[0])[0]
            out: torch.Tensor = h.float().pow(2).mean()
            return out

    model = Mixture()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "lr": 0.01}
    )
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))
    for _ in range(2):
        engine.backward(engine(torch.randn(16, 5, dtype=torch.bfloat16)))
        engine.step()
    weights, states = note(engine, deepspeed)
    local = {f"{name}.": module.num_local_experts for name, module in model.named_modules() if isinstance(module, MoE)}
    rank = torch.distributed.get_rank() % ranks

    def named(tensors: Tensors) -> Tensors:
        return {_global(name, local, rank): tensor for name, tensor in tensors.items()}

    return engine, named(weights), named(states)


def _global(name: str, local: Mapping[str, int], rank: int) -> str:
    """A name with the number that an expert has among those of all ranks."""
    layer = next((prefix for prefix in local if name.startswith(prefix)), None)
    match = re.search(r"deepspeed_experts\.(\d+)\.", name)
    if layer is None or match is None:
        return name
    return f"{name[: match.start(1)]}{rank * local[layer] + int(match[1])}{name[match.end(1) :]}"


class Embedding(torch.nn.Embedding):
    """Both ends of a pipeline: words to vectors, and back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) if x.dtype == torch.int64 else x @ self.weight.t()
        return out


class Counted(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(width, width)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lin(x)
        return torch.relu(out)


def train_pipeline(case: Case, deepspeed: Any) -> tuple[Any, Tensors, Tensors]:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embed", Embedding, 11, 6),
        LayerSpec(Counted, 6),
        LayerSpec(torch.nn.Linear, 6, 8),
        torch.tanh,
        LayerSpec(torch.nn.Linear, 8, 6),
        LayerSpec(Counted, 6),
        TiedLayerSpec("embed", Embedding, 11, 6),
    ]

    def loss(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return out.float().pow(2).mean()

    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.randint(11, (2, 4)), torch.zeros(2)

    data = batches()
    for _ in range(2):
        engine.train_batch(data)
    return engine, *note(engine, deepspeed)


def train_autotp(case: Case, deepspeed: Any) -> tuple[Any, Tensors, Tensors]:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(8, 24, bias=False)
            self.out = torch.nn.Linear(24, 8, bias=False)
            self.up = torch.nn.Linear(8, 16)
            self.down = torch.nn.Linear(16, 8)
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.norm(self.down(torch.tanh(self.up(x)))) + self.qkv(x).sum()
            return h

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            out: torch.Tensor = x.float().pow(2).mean()
            return out

    model = Tower()
    # Nothing is learnt, so that the weights of all ranks together are those before they were cut.
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))
    same = torch.Generator().manual_seed(case["seed"])  # tensor-parallel ranks see the same data
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 8, generator=same)))
        engine.step()
    return engine, weights, {}


def prepare(case: Case, place: Path) -> None:
    """Write the checkpoint with which a case of resuming begins, and our universal checkpoint of it."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.manual_seed(case["seed"])
    model, source = Net(case), place / "source"
    adam = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    for _ in range(0 if case["from"] == "hf" else 3):
        model(torch.randint(11, (2, 4))).backward()
        adam.step()
        adam.zero_grad()
    weights = model.state_dict()
    place.mkdir()
    if case["from"] == "hf":
        weights = {name: value.bfloat16() if value.is_floating_point() else value for name, value in weights.items()}
        owned = {name: value for name, value in weights.items() if not case["tied"] or name != "head.weight"}
        source.mkdir()
        save_file(owned, source / "model.safetensors", metadata={"format": "pt"})
    elif case["from"] == "pt":
        source = place / "source.pt"
        torch.save({"model": weights, "optimizer": adam.state_dict(), "epoch": 3}, source)
    else:
        states, optim = get_state_dict(model, adam)
        save({"model": states, "optim": optim}, checkpoint_id=source, no_dist=True)
    torch.save({"model": weights, "optimizer": adam.state_dict()}, place / BEGUN)
    command = [sys.executable, "-m", "ckptconv", "convert", str(source), "--universal", str(place / BEGIN), "--verify"]
    command += ["--zero-stage", str(case["stage"])] if case["own_stage"] else []
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)


def train_resumed(case: Case, deepspeed: Any) -> tuple[Any, Tensors, Tensors]:
    """Train on from a universal checkpoint, and beside it from what it was made of; losses and weights of both."""
    place = Path(case["place"])
    begun = torch.load(place / BEGUN, weights_only=True)
    batches = [torch.randint(11, (2, 4)) for _ in range(3)]

    def started(universal: bool) -> Any:
        torch.manual_seed(case["seed"] + 1)
        model = Net(case)
        if not universal:
            model.load_state_dict(begun["model"])
        # What the checkpoint knows is to be taken from there.
        groups, lr = grouped(model, case["groups"]), 0.01 if case["from"] == "hf" else 0.5
        groups = [{**group, "lr": lr * (number + 1)} for number, group in enumerate(groups)]
        config = {**config_of(case), "checkpoint": {"load_universal": universal}, "gradient_clipping": 0.0}
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.01}}
        if case["from"] != "hf":
            del config["scheduler"]
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
        if universal:
            kept = [{**group} for group in engine.optimizer.param_groups]
            engine.load_checkpoint(str(place), tag=None)
            if case["hyperparameters_lost"]:
                for group, before in zip(engine.optimizer.param_groups, kept, strict=True):
                    group.update({key: value for key, value in before.items() if key != "params"})
        return engine

    def trained(engine: Any) -> Tensors:
        losses = []
        for batch in batches:
            losses.append(engine(batch))
            engine.backward(losses[-1])
            engine.step()
        found = {"losses": torch.stack(losses).detach().clone()}
        for name, parameter in engine.module.named_parameters():
            # Of the masters, releases before 0.17 say the wrong thing once a universal checkpoint was loaded.
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                found[name] = parameter.detach().clone()
        return found

    engine = started(universal=True)
    weights = trained(engine)
    steps = engine.global_steps
    if steps != 3 + (0 if case["from"] == "hf" else 3):
        raise ValueError(f"{steps} steps were made, says DeepSpeed")
    if case["from"] == "hf":
        other = started(universal=False)
        expected = trained(other)
        other.destroy()
        return engine, weights, expected
    model = Net(case)
    model.load_state_dict(begun["model"])
    adam = torch.optim.AdamW(model.named_parameters())
    adam.load_state_dict(begun["optimizer"])
    losses = []
    for batch in batches:
        losses.append(model(batch))
        losses[-1].backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= case["world"]
        adam.step()
        adam.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return engine, weights, {"losses": torch.stack(losses).detach(), **expected}


TRAINING: dict[str, Callable[[Case, Any], tuple[Any, Tensors, Tensors]]] = {
    "dense": train_dense,
    "moe": train_moe,
    "pipeline": train_pipeline,
    "autotp": train_autotp,
    "resumed": train_resumed,
}


ADAM, SGD = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def note(engine: Any, deepspeed: Any, keys: Sequence[str] = ADAM) -> tuple[Tensors, Tensors]:
    """The live master weights and buffers, and the optimizer states, by name."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # It looked for states when the first group had made a step, and the others none.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    gathered = _round_robin(optimizer, keys) if getattr(optimizer, "round_robin_gradients", False) else {}
    weights: Tensors = {}
    states: Tensors = {}
    first = dict(engine.module.named_parameters())
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            live = weights[name] = parameter.detach().clone()
        if not parameter.requires_grad or not live.numel():
            continue
        held = dict(gathered[parameter]) if gathered else _held(parameter, stage, optimizer, keys)
        master = held.pop("", None)
        if master is not None:
            if not torch.equal(master.to(live.dtype), live):
                raise ValueError(f"DeepSpeed says of {name} what does not round to what it computes with")
            weights[name] = master
        if name in first:  # a tied parameter has its states once
            states.update((f"{name}.{key}", state) for key, state in held.items())
    persistent = engine.module.state_dict().keys() if stage != 3 else [n for n in _buffers(engine) if n != "passing"]
    weights |= {name: buffer for name, buffer in _buffers(engine).items() if name in persistent}
    return weights, states


def _buffers(engine: Any) -> Tensors:
    return {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()}


def _held(parameter: Any, stage: int, optimizer: Any, keys: Sequence[str]) -> Tensors:
    """A parameter's master weights, under "", and its states, as DeepSpeed says. ZeRO-0 may have but the parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {}
    if stage or hasattr(parameter, "_hp_mapping"):  # BF16_Optimizer was once ZeRO-0's, too
        found = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        found[""] = safe_get_full_fp32_param(parameter)
    elif isinstance(optimizer, torch.optim.Optimizer):
        found = {key: optimizer.state.get(parameter, {}).get(key) for key in keys}
    return {key: tensor.detach().clone() for key, tensor in found.items() if tensor is not None}


def _round_robin(optimizer: Any, keys: Sequence[str]) -> dict[Any, Tensors]:
    """What `_held` gives, for round robin, where DeepSpeed looks in the wrong places: from the gathered partitions."""
    found: dict[Any, Tensors] = {}
    for number, partition in enumerate(optimizer.single_partition_of_fp32_groups):
        state = optimizer.optimizer.state[partition]
        for key in ("", *keys):
            own = partition.detach() if not key else state[key]
            parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, own)
            flat, at = torch.cat(parts), 0
            for parameter in optimizer.round_robin_bit16_groups[number]:
                piece = flat[at : at + parameter.numel()].reshape(parameter.shape).clone()
                found.setdefault(parameter, {})[key] = piece
                at += parameter.numel()
    return found


def started() -> Any:
    """DeepSpeed, quiet and with gloo between the ranks."""
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    # gloo does without this extension, which is compiled when first used, under a lock that a killed process leaves
    # behind for all that come after it.
    communication: Any = sys.modules["deepspeed.comm.torch"]  # by attributes that name means torch itself
    communication.build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    return deepspeed


def train(directory: Path) -> None:
    """One rank's part: train and save every case of this launch."""
    deepspeed = started()
    # It can be computed, if slowly, whatever DeepSpeed thinks of CPUs.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    rank = torch.distributed.get_rank()
    for case in json.loads((directory / PENDING).read_text()):
        place = directory / case["name"]
        place.mkdir(exist_ok=True)
        torch.distributed.barrier()
        engine: Any = None
        try:
            torch.manual_seed(case["seed"])
            engine, weights, states = TRAINING[case["kind"]](case, deepspeed)
            options = {"exclude_frozen_parameters": True} if case.get("exclude_frozen") else {}
            engine.save_checkpoint(str(place / "checkpoint"), **options)
            torch.save({"weights": weights, "states": states}, place / NOTES.format(rank))
        except Exception:
            if not (place / FAILED).exists():
                (place / FAILED).write_text(traceback.format_exc())
            os._exit(1)  # the other ranks may wait for this one for ever
        finally:
            if engine is not None:
                engine.destroy()
            del engine
            gc.collect()


# ------------------------------------------------------------------------------------------------------- who is right


def notes_of(case: Case, directory: Path) -> tuple[Tensors, Tensors]:
    """What the live ranks noted, together."""
    weights: Tensors = {}
    states: Tensors = {}
    for rank in range(case["world"]):
        noted = torch.load(directory / case["name"] / NOTES.format(rank), weights_only=True)
        weights |= noted["weights"]
        states |= noted["states"]
    return weights, states


def compare(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    """RIGHT, or what is wrong first: names, shapes, dtypes or bits. Half precision counts as widened."""
    missing, more = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    if missing or more:
        parts = [f"lacks {missing[0]} (of {len(missing)})"] * bool(missing)
        parts += [f"invents {more[0]} (of {len(more)})"] * bool(more)
        return "wrong: " + ", ".join(parts)
    for name, tensor in expected.items():
        mine, theirs = _widened(got[name]), _widened(tensor)
        if mine.shape != theirs.shape:
            return f"wrong: {name} has the shape {list(mine.shape)}, not {list(theirs.shape)}"
        if mine.dtype != theirs.dtype:
            return f"wrong: {name} is {mine.dtype}, not {theirs.dtype}"
        if not torch.equal(_bits(mine), _bits(theirs)):
            return f"wrong: {name} has other values"
    return RIGHT


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def judge_official(directory: Path) -> None:
    """What DeepSpeed's own converters make of every case: printed as JSON by name, of its weights and how our universal
    checkpoint compares with its. Runs in its environment."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    verdicts: dict[str, list[str]] = {}
    for case in json.loads((directory / CASES).read_text()):
        place = directory / case["name"]

        def weights(place: Path = place, case: Case = case) -> str:
            got = get_fp32_state_dict_from_zero_checkpoint(str(place / "checkpoint"))
            return compare(got, notes_of(case, directory)[0])

        def universal(place: Path = place, case: Case = case) -> str:
            return compare_universal(place / OURS, place / THEIRS, *notes_of(case, directory))

        written = (place / OURS / "zero").exists() and _attempted(functools.partial(write_universal, place)) == RIGHT
        verdicts[case["name"]] = [_attempted(weights), _attempted(universal) if written else ""]
    print(json.dumps(verdicts))


def _attempted(judge: Callable[[], str]) -> str:
    try:
        sys.stdout = sys.stderr  # it prints
        return judge()
    except Exception as error:
        return " ".join(f"fails: {type(error).__name__}: {error}".split())
    finally:
        sys.stdout = sys.__stdout__


def judge_resumed(case: Case, directory: Path) -> tuple[str, str]:
    """Whether a training that began with our universal checkpoint has the losses and weights of the one that it is to
    equal: bit for bit, or nearly so if the other one ran without DeepSpeed."""
    weights, expected = notes_of(case, directory)
    if case["from"] != "hf":
        near = [name for name, one in expected.items() if torch.allclose(weights[name], one, rtol=1e-5, atol=1e-7)]
        expected = {name: weights[name] if name in near else one for name, one in expected.items()}
    return compare(weights, expected), ""


def judge_ours(case: Case, directory: Path) -> tuple[str, str]:
    """What our converter makes of a case: weights and optimizer states."""
    from safetensors.torch import load_file

    if case["kind"] == "resumed":
        return judge_resumed(case, directory)
    place = directory / case["name"]
    weights, states = notes_of(case, directory)
    output, optimizer = place / "ours.safetensors", place / "ours.optimizer.safetensors"
    for path in (output, optimizer):
        path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ckptconv", "zero-to-fp32", str(place / "checkpoint"), str(output)]
    command += ["--tied", "duplicate", *(["--optimizer", str(optimizer)] if states else [])]
    command += ["--universal", str(place / OURS)] if case["stage"] else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        return f"fails: {done.stderr.strip()}", ""
    verdict = compare(load_file(output), weights)
    if not states:
        return verdict, ""
    got = {name.removeprefix("state."): tensor for name, tensor in load_file(optimizer).items()}
    got = {name: tensor for name, tensor in got.items() if not name.endswith(".step") and tensor.numel()}
    return verdict, compare(got, states)


# -------------------------------------------------------------------------------------------- universal checkpoints

COMMON = "zero/optimizer_state.pt"


def write_universal(place: Path) -> str:
    """Have DeepSpeed's own tool write a universal checkpoint of a case; RIGHT if it does."""
    from deepspeed.checkpoint.ds_to_universal import main as convert

    shutil.rmtree(place / THEIRS, ignore_errors=True)
    tag = place / "checkpoint" / (place / "checkpoint" / "latest").read_text()
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(tag), "output_folder": str(place / THEIRS)}
    convert(argparse.Namespace(**folders, **options, inject_missing_state=True))
    return RIGHT


def compare_universal(ours: Path, theirs: Path, weights: Tensors, states: Tensors) -> str:
    """RIGHT, or where our universal checkpoint is not what DeepSpeed's tool wrote, unless ours is what the live model
    had, and its not. Ours may say more of what no optimizer trains: its tool wrote nothing of that before 0.19."""
    live = {f"{name}.fp32": tensor for name, tensor in weights.items()} | states
    mine, other = _files_in(ours), _files_in(theirs)
    trained = {name.rpartition(".")[0] for name in states}
    if missing := sorted(other - mine):
        return f"wrong: lacks {missing[0]} (of {len(missing)})"
    more = sorted(name for name in mine - other if not name.startswith("zero/") or name.split("/")[1] in trained)
    if more:
        return f"wrong: invents {more[0]} (of {len(more)})"
    for name in sorted(other):
        if not name.startswith("zero/"):
            if (ours / name).read_bytes() != (theirs / name).read_bytes():
                return f"wrong: {name} is no copy"
            continue
        got, expected = (torch.load(place / name, weights_only=False) for place in (ours, theirs))
        if name == COMMON:
            expected = _without_partitions(expected)
        if difference := _difference(got, expected):
            known = live.get(name.removeprefix("zero/").removesuffix(".pt").replace("/", "."))
            if known is None or not _holds(got, known) or _holds(expected, known):
                return f"wrong: {name} {difference}"
    return RIGHT


def _without_partitions(common: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's tool says of the optimizer as a whole, without rank 0's partitions and their states, which it
    leaves there under ZeRO-3, and which nothing reads there; and without the settings in which groups differ, as ZeRO-3
    would give all groups those of the first."""
    common = {key: value for key, value in common.items() if key != "fp32_flat_groups"}
    if isinstance(inner := common.get("optimizer_state_dict"), dict):
        steps = {group: {"step": state["step"]} for group, state in inner["state"].items() if "step" in state}
        groups = inner.get("param_groups", [])
        alike = [key for key in (groups[0] if groups else ()) if all(one.get(key) == groups[0][key] for one in groups)]
        kept = [{key: one[key] for key in one if key in alike or key == "params"} for one in groups]
        common["optimizer_state_dict"] = {**inner, "state": steps} | ({"param_groups": kept} if groups else {})
    return common


def _files_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*.pt")}


def _holds(value: Any, known: torch.Tensor) -> bool:
    """Whether a file of a universal checkpoint holds the elements that the live model had."""
    tensor = value["param"] if isinstance(value, dict) else value
    return compare({"": tensor.reshape(-1)}, {"": known.reshape(-1)}) == RIGHT


def _difference(got: Any, expected: Any, path: str = "") -> str:
    """ "", or where two trees differ first: types, keys, dtypes, shapes, bits."""
    if isinstance(expected, dict) and isinstance(got, dict):
        if set(got) != set(expected):
            return f"has other keys {path}: {sorted(map(str, set(got) ^ set(expected)))}"
        return next(filter(None, (_difference(got[key], expected[key], f"{path}.{key}") for key in expected)), "")
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(got) == len(expected):
        pairs = enumerate(zip(got, expected, strict=True))
        return next(filter(None, (_difference(a, b, f"{path}.{index}") for index, (a, b) in pairs)), "")
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        verdict = compare({path: got}, {path: expected})
        return "" if verdict == RIGHT else verdict.removeprefix("wrong: ")
    if isinstance(expected, (torch.Tensor, dict, list, tuple)) or type(got) is not type(expected):
        return f"has {type(got).__name__} at {path}, not {type(expected).__name__}"
    same = vars(got) == vars(expected) if hasattr(expected, "__dict__") else got == expected
    return "" if same else f"has {got!r:.40} at {path}, not {expected!r:.40}"


# ----------------------------------------------------------------------------------------------------------- launching


def environment(version: str) -> Path:
    """The Python of an environment with DeepSpeed in it, which is made where it is not there."""
    place = ROOT / "build" / f"deepspeed-{version or 'latest'}"
    python, done = place / "bin" / "python", place / ".installed"
    if not done.exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        # torch alone and first: nothing that follows may bring another one.
        subprocess.run([*pip, TORCH], check=True)
        requirement = f"deepspeed=={version}" if version else "deepspeed"
        subprocess.run([*pip, "setuptools", requirement], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        done.touch()
    return python


def release_of(python: Path) -> tuple[int, ...]:
    """The release of DeepSpeed in an environment."""
    asking = [str(python), "-c", "import importlib.metadata; print(importlib.metadata.version('deepspeed'))"]
    told = subprocess.run(asking, capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in told.strip().split(".")[:3])


def launch(python: Path, cases: Sequence[Case], directory: Path) -> None:
    """Train `cases`, all of one kind and number of ranks. One that fails takes its ranks with it: others train on."""
    directory.mkdir(parents=True)
    for case in cases:
        if case["kind"] == "resumed":
            case["place"] = str(directory / case["name"])
            prepare(case, directory / case["name"])
    (directory / CASES).write_text(json.dumps(cases))
    pending = list(cases)
    while pending:
        (directory / PENDING).write_text(json.dumps(pending))
        _run_ranks(python, pending, directory)
        while pending and _is_noted(pending[0], directory):
            del pending[0]
        if pending:
            failed = directory / pending.pop(0)["name"] / FAILED
            failed.parent.mkdir(exist_ok=True)
            if not failed.exists():
                failed.write_text(f"no end; see {directory / LOG.format(0)}")


def _is_noted(case: Case, directory: Path) -> bool:
    place = directory / case["name"]
    return all((place / NOTES.format(rank)).exists() for rank in range(case["world"])) and not (place / FAILED).exists()


def _run_ranks(python: Path, cases: Sequence[Case], directory: Path) -> None:
    """One process for each rank, until all end, one fails, or nothing happens any more."""
    world = cases[0]["world"]
    settings = {
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = []
    for rank in range(world):
        own = {**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (directory / LOG.format(rank)).open("a") as log:
            command = [str(python), __file__, "--train", str(directory)]
            ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    done, since = 0, time.monotonic()
    try:
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.2)
            noted = len(list(directory.glob(f"*/{NOTES.format('*')}")))
            if noted > done:
                done, since = noted, time.monotonic()
            if time.monotonic() - since > PATIENCE:
                break
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def official_verdicts(python: Path, directory: Path) -> dict[str, list[str]]:
    command = [str(python), __file__, "--official", str(directory)]
    quiet = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    try:
        verdicts: dict[str, list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return verdicts


def check(python: Path, cases: Sequence[Case], directory: Path) -> int:
    """Train, convert and compare all cases, a line for each; how often ours was wrong."""
    shutil.rmtree(directory, ignore_errors=True)
    wrong = trained = 0
    print(f"{'case':<44} {'ours':<8} {'states':<8} {'universal':<9} DeepSpeed's own")
    for kind, world in dict.fromkeys((case["kind"], case["world"]) for case in cases):
        own = [case for case in cases if (case["kind"], case["world"]) == (kind, world)]
        place = directory / f"{kind}-{world}"
        launch(python, own, place)
        ours = {case["name"]: judge_ours(case, place) for case in own if _is_noted(case, place)}
        official = official_verdicts(python, place) if kind != "resumed" else {}
        for name in (case["name"] for case in own):
            if name not in ours:
                lines = (place / name / FAILED).read_text().strip().splitlines()
                reason = [line for line in lines if not line.startswith(" ")][-1]
                print(f"{name:<44} not trained: {reason[:100]}", flush=True)
                continue
            trained += 1
            theirs, universal = official.get(name, ["", ""])
            verdicts = {"weights": ours[name][0], "states": ours[name][1], "universal": universal}
            weights, states, universal = (verdict.partition(":")[0] for verdict in verdicts.values())
            print(f"{name:<44} {weights:<8} {states:<8} {universal:<9} {theirs[:100]}", flush=True)
            for what, verdict in verdicts.items():
                if verdict not in (RIGHT, ""):
                    wrong += 1
                    print(f"    ours, {what}: {verdict}")
    print(f"{trained} of {len(cases)} cases trained; ours is wrong in {wrong}. The checkpoints are in {directory}")
    return wrong if trained else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--version", default="", help="of DeepSpeed; default: the latest")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="random models; default: 12")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--kind", default="", choices=["", *TRAINING], help="only cases of this kind")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--official", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        train(options.train)
        # Threads of process groups may not want to end.
        os._exit(0)
    if options.official:
        judge_official(options.official)
        return 0
    python = environment(options.version)
    directory = ROOT / "build" / f"deepspeed-checkpoints-{options.version or 'latest'}-{options.seed}"
    cases = make_cases(options.rounds, options.seed, release_of(python))
    cases = [case for case in cases if options.kind in ("", case["kind"])]
    return 1 if check(python, cases, directory) else 0


if __name__ == "__main__":
    sys.exit(main())
