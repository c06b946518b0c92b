"""Steps as trainers save them, and whether the trainer's own loader takes one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cells import of_features
from safetensors.torch import load_file, save_file


def state_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(40, 30, generator=generator), "b.weight": torch.randn(50, generator=generator)}


def optimizer_of(seed: int) -> dict[str, Any]:
    parameters = [torch.nn.Parameter(tensor) for tensor in state_of(seed).values()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def save_trainer(step: Path, seed: int) -> Sequence[str]:
    """As transformers' Trainer does: the files in its order."""
    step.mkdir(parents=True, exist_ok=True)
    save_file(state_of(seed), step / "model.safetensors", {"format": "pt"})
    torch.save({"seed": 1}, step / "training_args.bin")
    torch.save(optimizer_of(seed), step / "optimizer.pt")
    torch.save({"last_epoch": seed}, step / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, step / "rng_state.pth")
    (step / "trainer_state.json").write_text(json.dumps({"global_step": seed, "log_history": [{"step": seed}]}))
    return [
        *("model.safetensors", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
        "trainer_state.json",
    ]


def loads_trainer(step: Path) -> None:
    load_file(step / "model.safetensors")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.load(step / name, weights_only=True)
    json.loads((step / "trainer_state.json").read_text())


def save_torch(step: Path, seed: int) -> Sequence[str]:
    step.mkdir(parents=True, exist_ok=True)
    torch.save(state_of(seed), step / "model.pt")
    torch.save(optimizer_of(seed), step / "optim.pt")
    return ["model.pt", "optim.pt"]


def loads_torch(step: Path) -> None:
    for name in ("model.pt", "optim.pt"):
        torch.load(step / name, weights_only=True)


class Saver(NamedTuple):
    """How a trainer saves a step; it returns the files in the order in which they are written. `loads` raises what the
    trainer's loader raises. `name` has {} for the number."""

    save: Callable[[Path, int], Sequence[str]]
    loads: Callable[[Path], None]
    name: str

    def run(self, place: Path, *numbers: int) -> Path:
        for number in numbers:
            self.save(place / self.name.format(number), number)
        return place

    def takes(self, step: Path) -> bool:
        try:
            self.loads(step)
        except BaseException:  # torch has one for checkpoints that is no Exception
            return False
        return True


SAVERS = {
    "trainer": Saver(save_trainer, loads_trainer, "checkpoint-{}"),
    "torch": Saver(save_torch, loads_torch, "step_{}"),
    **{
        name: Saver(functools.partial(save, state_of), *more)
        for each in of_features("SAVERS")
        for name, (save, *more) in each.items()
    },
}
