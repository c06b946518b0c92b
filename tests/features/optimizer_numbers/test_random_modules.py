"""Numbers of optimizers over made up modules: each state is the parameter's own, or all are refused; then each way that
the message names leads to the right ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import TIMES
from reading import states_of
from safetensors.torch import save_model
from torch import nn

import ckptconv
from ckptconv.errors import UnsupportedError

WORDS = ["q", "k", "v", "o", "up", "down", "gate", "norm", "a", "b", "proj", "embed", "head", "scale", "w1", "w2", "z"]


WRAPPED = "module._orig_mod."
KINDS = ["parameter", "parameter", "buffer", "linear", "norm", "batch", "list", "lora", "inner", "complex", "dict"]


class Made(nn.Module):
    """A module with parameters, buffers and modules of random names, in a random order."""

    def __init__(self, dice: random.Random, depth: int = 0) -> None:
        super().__init__()
        for name in dice.sample(WORDS, dice.randint(1, 4)):
            kind = dice.choice(KINDS)
            wide = dice.choice([2, 2, 2, 3])
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.zeros(dice.choice([(2,), (2, 2), (3, 2), (2, 3)]))))
            elif kind == "complex":
                self.register_parameter(name, nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))
            elif kind == "dict":
                named = {key: nn.Parameter(torch.zeros(2, 2)) for key in dice.sample(WORDS, 3)}
                self.add_module(name, nn.ParameterDict(named))
            elif kind == "buffer":
                self.register_buffer(name, torch.zeros(dice.choice([(wide,), (2, 2)])))
            elif kind == "linear":
                self.add_module(name, nn.Linear(2, wide, bias=dice.random() < 0.5))
            elif kind == "norm":
                self.add_module(name, nn.LayerNorm(wide))
            elif kind == "batch":
                self.add_module(name, nn.Sequential(nn.Conv2d(1, wide, 2), nn.BatchNorm2d(wide)))
            elif kind == "list":
                self.add_module(name, nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(dice.choice([2, 12]))]))
            elif kind == "lora":
                self.add_module(
                    name, nn.ModuleDict({"lora_B": nn.Linear(1, 2, False), "lora_A": nn.Linear(2, 1, False)})
                )
            elif depth < 2:
                self.add_module(name, Made(dice, depth + 1))


def module(dice: random.Random) -> nn.Module:
    """A module with at least one parameter; some are tied, some frozen, and each has values of its own."""
    while True:
        made = Made(dice)
        if any(True for _ in made.parameters()):
            break
    linears = [each for each in made.modules() if isinstance(each, nn.Linear) and each.weight.shape == (2, 2)]
    if len(linears) > 1 and dice.random() < 0.3:
        one, other = dice.sample(linears, 2)
        other.weight = one.weight
    for at, tensor in enumerate([*made.parameters(), *made.buffers()]):
        if tensor.is_floating_point():
            tensor.data.fill_(at + 1)
    if dice.random() < 0.3:
        for parameter in made.parameters():
            parameter.requires_grad_(dice.random() < 0.7)
    if not any(each.requires_grad for each in made.parameters()):
        next(made.parameters()).requires_grad_(True)
    return made


def decayed(made: nn.Module, at: int, parameter: torch.Tensor) -> bool:
    """nanoGPT's matrices, as the Trainer's without norms."""
    return parameter.ndim > 1


def by_layer(made: nn.Module, at: int, parameter: torch.Tensor) -> tuple[int, bool]:
    """timm's groups, of a layer each, decayed or not; the last layer has the first."""
    return (-at // 3, parameter.ndim > 1)


def early(made: nn.Module, at: int, parameter: torch.Tensor) -> bool:
    """The second half first."""
    return at < len([*made.parameters()]) // 2


def alternating(made: nn.Module, at: int, parameter: torch.Tensor) -> int:
    return at % 2


GROUPINGS = [decayed, by_layer, early, alternating]


def optimizers(dice: random.Random, made: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer of a module, of one group or several, or Muon beside AdamW; each has made a step. Each group has
    its parameters in the module's order, unless their names are recorded."""
    trained = [(name, each) for name, each in made.named_parameters() if each.requires_grad]
    only = [each for _, each in trained]
    matrices = [each for each in only if each.ndim == 2 and not each.is_complex()]
    others = [each for each in only if each.ndim != 2 or each.is_complex()]
    kind = dice.choice(["adamw", "adamw", "amsgrad", "sgd", "groups", "groups", "added", "muon", "sorted", "recorded"])
    found: list[torch.optim.Optimizer]
    if kind == "sorted" and matrices and others:
        # Muon with Adam, as Keller Jordan's optimizer of both: matrices are sorted by size.
        matrices.sort(key=lambda each: each.size(), reverse=True)
        found = [torch.optim.AdamW([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])]
    elif kind == "muon" and matrices and others:
        found = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    elif kind in ("groups", "added", "muon"):
        grouping, groups = dice.choice(GROUPINGS), dict[Any, list[nn.Parameter]]()
        for at, each in enumerate(only):
            groups.setdefault(grouping(made, at, each), []).append(each)
        every = [{"params": groups[key], "lr": 0.1 * at} for at, key in enumerate(sorted(groups), 1)]
        found = [torch.optim.AdamW(every if kind == "groups" else every[:1])]
        for group in every[1:] if kind != "groups" else []:
            found[0].add_param_group(group)
    elif kind == "recorded":
        dice.shuffle(trained)
        found = [torch.optim.AdamW(trained)]
    elif kind == "sgd":
        found = [torch.optim.SGD(only, lr=0.1, momentum=0.9)]
    else:
        found = [torch.optim.AdamW(only, amsgrad=kind == "amsgrad")]
    for at, parameter in enumerate(made.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (at + 1)) if parameter.requires_grad else None
    for each in found:
        each.step()
    return found


def expected(made: nn.Module, found: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in made.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value
        for each in found
        for parameter, own in each.state.items()
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
    }


def same_file(made: nn.Module, states: Any, path: Path) -> list[Any]:
    torch.save({"model": made.state_dict(), "optimizers": states}, path / "train.pt")
    return [path / "train.pt"]


def plain_dict(made: nn.Module, states: Any, path: Path) -> list[Any]:
    weights = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    torch.save({"model": weights, "optimizers": states}, path / "train.pt")
    return [path / "train.pt"]


def sorted_dict(made: nn.Module, states: Any, path: Path) -> list[Any]:
    weights = dict(sorted(made.state_dict().items()))
    torch.save({"model": weights, "optimizers": states}, path / "train.pt")
    return [path / "train.pt"]


def wrapped(made: nn.Module, states: Any, path: Path) -> list[Any]:
    """As DistributedDataParallel and torch.compile name what they wrap."""
    weights = type(made.state_dict())((f"{WRAPPED}{name}", each) for name, each in made.state_dict().items())
    torch.save({"model_state_dict": weights, "optimizer_state_dict": states}, path / "train.pt")
    return [path / "train.pt"]


def as_pair(made: nn.Module, states: Any, path: Path) -> list[Any]:
    torch.save((made.state_dict(), *states), path / "train.pt")
    return [path / "train.pt"]


def as_composer(made: nn.Module, states: Any, path: Path) -> list[Any]:
    optimizers = {f"Optimizer{at}": each for at, each in enumerate(states)}
    torch.save({"state": {"model": made.state_dict(), "optimizers": optimizers}, "rng": []}, path / "train.pt")
    return [path / "train.pt"]


def beside(made: nn.Module, states: Any, path: Path) -> list[Any]:
    save_model(made, str(path / "model.safetensors"))
    torch.save(states[0], path / "optimizer.pt")
    return [path]


SAVED = [same_file, plain_dict, sorted_dict, wrapped, as_pair, as_composer, beside]


def is_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], aliases: dict[str, str]) -> bool:
    def called(name: str) -> str:
        parameter, _, key = name.removeprefix(WRAPPED).rpartition(".")
        return f"{aliases.get(parameter, parameter)}.{key}"

    named = {called(name): tensor for name, tensor in found.items()}
    return named.keys() == wanted.keys() and all(torch.equal(named[name], wanted[name]) for name in wanted)


def ways(made: nn.Module, found: list[torch.optim.Optimizer], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {parameter: name for name, parameter in made.named_parameters()}
    groups = [[names[each] for each in group["params"]] for own in found for group in own.param_groups]
    (path / "order.json").write_text(json.dumps(groups))
    yield "groups", {"order": path / "order.json"}
    (path / "order.txt").write_text("\n".join(name for name, _ in made.named_parameters()))
    yield "names", {"order": path / "order.txt"}
    torch.save(made.state_dict(), path / "order.pt")
    yield "state dict", {"order": path / "order.pt"}


@pytest.mark.parametrize("saved", SAVED, ids=lambda each: each.__name__)
def test_no_state_is_another_parameter_s(saved: Any, tmp_path: Path) -> None:
    taken = refused = 0
    for seed in range(30 * TIMES):
        dice = random.Random(f"{saved.__name__} {seed}")
        made = module(dice)
        found = optimizers(dice, made)
        if saved is beside and len(found) > 1:
            continue
        wanted = expected(made, found)
        names = {parameter: name for name, parameter in made.named_parameters()}
        aliases = {name: names[parameter] for name, parameter in made.named_parameters(remove_duplicate=False)}
        path = tmp_path / str(seed)
        path.mkdir()
        source = saved(made, [each.state_dict() for each in found], path)[0]
        try:
            assert is_same(states_of(source), wanted, aliases), seed
            taken += 1
        except UnsupportedError:
            refused += 1
        for way, options in ways(made, found, path):
            try:
                assert is_same(states_of(source, **options), wanted, aliases), (seed, way)
            except ckptconv.UsageError:
                assert way == "state dict", seed
            except UnsupportedError:
                # A flat list does not tell which parameters of equal shapes are frozen, or in which group.
                assert way != "groups", seed
    assert taken > 5
    assert refused
