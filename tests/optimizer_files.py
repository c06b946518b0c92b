"""Files of torch.save with the states of optimizers beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptconv.options.registered import missing

STEPS = 3
# How an optimizer's states are stored: by the names of parameters, as FSDP has them; by numbers; and by numbers whose
# names are recorded. Without a feature, numbers have no names.
FORMS = ("names", "numbers", "recorded") if not missing("order") else ("names",)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    model.register_buffer("count", torch.tensor(2**40 + 1))
    return model


def trained(groups: int = 1, recorded: bool = False) -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
    model = network()
    parameters: list[Any] = list(model.named_parameters() if recorded else model.parameters())
    parts = [{"params": parameters[number::groups], "lr": 0.1 * (number + 1)} for number in range(groups)]
    optimizer = torch.optim.AdamW(parts)
    for _ in range(STEPS):
        model(torch.randn(4, 5)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_names(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the state dicts of a model's optimizers with names in the place of numbers, as FSDP.optim_state_dict."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    renamed = []
    for optimizer in optimizers:
        state = optimizer.state_dict()
        members = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        groups = [
            {**group, "params": [members[number] for number in group["params"]]} for group in state["param_groups"]
        ]
        renamed.append({"state": {members[at]: held for at, held in state["state"].items()}, "param_groups": groups})
    return renamed


def training_saved(path: Path, form: str = "names", groups: int = 1, **more: Any) -> dict[str, Any]:
    """Save a training checkpoint with torch.save; return what it holds. `form` is one of FORMS."""
    model, optimizer = trained(groups, form == "recorded")
    (named,) = by_names(model, optimizer)
    states = named if form == "names" else optimizer.state_dict()
    state = {"model": model.state_dict(), "optimizer": states, "epoch": 1, **more}
    torch.save(state, path)
    return state


def by_name(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of a training checkpoint's optimizer by the names of its model's parameters."""
    names = [name for name in state["model"] if name != "count"]
    groups = len(state["optimizer"]["param_groups"])
    order = [name for number in range(groups) for name in names[number::groups]]
    return {
        f"{order[number] if type(number) is int else number}.{key}": value
        for number, held in state["optimizer"]["state"].items()
        for key, value in held.items()
    }


def muon_saved(path: Path, form: str = "names") -> dict[str, torch.Tensor]:
    """Save a model with Muon for its matrices and AdamW for the rest; return the states by name. `form` is "names" or
    "numbers"."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12)), torch.nn.LayerNorm(4))
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim == 1]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    for at, each in enumerate(model.parameters()):
        each.grad = torch.full_like(each, at + 1.0)
    for optimizer in optimizers:
        optimizer.step()
    saved = by_names(model, *optimizers) if form == "names" else [each.state_dict() for each in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": saved}, path)
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
