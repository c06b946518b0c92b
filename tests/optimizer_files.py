"""Files of torch.save with the states of optimizers beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

STEPS = 3


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    model.register_buffer("count", torch.tensor(2**40 + 1))
    return model


def trained(named: bool = False, groups: int = 1) -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
    model = network()
    parameters: list[Any] = list(model.named_parameters() if named else model.parameters())
    parts = [{"params": parameters[number::groups], "lr": 0.1 * (number + 1)} for number in range(groups)]
    optimizer = torch.optim.AdamW(parts)
    for _ in range(STEPS):
        model(torch.randn(4, 5)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def training_saved(path: Path, named: bool = False, groups: int = 1, **more: Any) -> dict[str, Any]:
    """Save a training checkpoint with torch.save; return what it holds."""
    model, optimizer = trained(named, groups)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1, **more}
    torch.save(state, path)
    return state


def by_name(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of a training checkpoint's optimizer by the names of its model's parameters."""
    names = [name for name in state["model"] if name != "count"]
    groups = len(state["optimizer"]["param_groups"])
    order = [name for number in range(groups) for name in names[number::groups]]
    return {
        f"{order[number]}.{key}": value
        for number, held in state["optimizer"]["state"].items()
        for key, value in held.items()
    }


def muon_saved(path: Path) -> dict[str, torch.Tensor]:
    """Save a model with Muon for its matrices and AdamW for the rest; return the states by name."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12)), torch.nn.LayerNorm(4))
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim == 1]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    for at, each in enumerate(model.parameters()):
        each.grad = torch.full_like(each, at + 1.0)
    for optimizer in optimizers:
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}, path)
    states = {parameter: own for each in optimizers for parameter, own in each.state.items()}
    named = model.named_parameters()
    return {f"{name}.{key}": value for name, each in named for key, value in states[each].items()}


def stepped(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """An optimizer of two groups, as the Trainer makes it, after a step, and its states by name."""
    named = list(model.named_parameters())
    decayed = [each for name, each in named if each.ndim > 1]
    others = [each for name, each in named if each.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    for at, (_, parameter) in enumerate(named):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    optimizer.step()
    return optimizer, {f"{name}.{key}": value for name, each in named for key, value in optimizer.state[each].items()}
