"""What of a state dict is the model and what the optimizer, and the dict put together again of its leaves. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.formats.dcp.metadata import Path, named

# Under which of these a training loop puts its model; the first that is there is meant.
WRAPPERS = ("model", "state_dict", "module")
# Megatron numbers several optimizers, whose names have dots.
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?s?(?:_states?)?(?:[_-]?\d+)?")
_WHOLE_NAME = re.compile(rf"({_OPTIMIZER.pattern})\.(.+)", re.DOTALL)
# What torch's optimizers hold, nested, or flat with the parameter in the key.
_STATE, _GROUPS = "state", "param_groups"
# What FSDP calls the parameters that it has made one of several; its LOCAL_STATE_DICT holds nothing else of them.
FLAT_PARAMETER = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?(?=$|\.)")
# What trainers put beside a model whose names are at the top; a model's own modules are not called so.
_TRAINING = frozenset({"train_state", "lr_scheduler", "lr_schedulers", "dataloader", "data_loader", "rng_state"})
# What optimizers call their states.
_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step", "param", "fp32_param"})


def _begins(step: str | int, word: str) -> bool:
    """Whether `step` is `word`, or a flat key that begins with it."""
    return step == word or (type(step) is str and step.startswith(word + "."))


def _is_inside(step: str | int) -> bool:
    return _begins(step, _STATE) or _begins(step, _GROUPS)


def _is_called(step: str | int) -> bool:
    """Whether `step` is what an optimizer is called."""
    return type(step) is str and _OPTIMIZER.fullmatch(step) is not None


@dataclass
class Roles:
    """What the parts of a state dict are.

    `models` are the paths of the models, by the path of what each is in; none where the model is everything that has no
    other role. `optimizers` are the paths of what holds "state" and "param_groups". `training` are the first steps of
    what a trainer keeps beside a model whose names are at the top.
    """

    models: dict[Path, Path]
    optimizers: set[Path]
    training: set[str | int]

    @classmethod
    def of(cls, paths: Collection[Path], tensors: Collection[Path]) -> Roles:
        """The roles in a state dict with values at `paths`, of which `tensors` are tensors."""
        optimizers = _optimizers(paths)
        rest = [path for path in tensors if _optimizer_of(path, optimizers) is None]
        models = _models(rest, optimizers)
        return cls(models, optimizers, set() if models else _beside(rest, tensors, optimizers))

    def optimizer_of(self, path: Path) -> Path | None:
        """The path of the optimizer that `path` leads into, if any."""
        return _optimizer_of(path, self.optimizers)

    @property
    def model(self) -> Path:
        """The path of the model, where there is one and it has a place of its own; else ()."""
        return next(iter(self.models.values())) if len(self.models) == 1 else ()

    def is_model(self, path: Path) -> bool:
        """Whether `path` leads into what is converted."""
        if self.models:
            return any(self.models.get(path[: depth - 1]) == path[:depth] for depth in range(1, len(path)))
        return self.optimizer_of(path) is None and not (len(path) > 1 and path[0] in self.training)

    def part_of(self, path: Path) -> Path:
        """The part of the state dict that `path` leads into: an optimizer, or what stands beside the model."""
        optimizer = self.optimizer_of(path)
        if optimizer:
            return optimizer
        parent = self.model[:-1]
        depth = len(parent) if path[: len(parent)] == parent else 0
        return path[: depth + 1]

    def model_beside(self, optimizer: Path) -> Path:
        """Where there are several models, the one that `optimizer` stands beside; else ()."""
        above = (optimizer[:depth] for depth in range(len(optimizer), -1, -1)) if len(self.models) > 1 else ()
        return next((self.models[place] for place in above if place in self.models), ())


def split_name(path: Path) -> Path:
    """The path of an optimizer's entry that is one name with dots in it, as where no paths are told: the optimizer, and
    what is in it. Others are as they are."""
    match = _WHOLE_NAME.fullmatch(path[0]) if len(path) == 1 and type(path[0]) is str else None
    return (match[1], match[2]) if match else path


def _optimizers(paths: Iterable[Path]) -> set[Path]:
    """The paths of all optimizers: what is called one, at the top or where it holds what an optimizer does; and what
    holds param_groups, whatever it is called."""
    found: set[Path] = set()
    for path in map(split_name, paths):
        for depth, step in enumerate(path):
            below = path[depth + 1 :]
            if below and step in WRAPPERS:
                break
            if _begins(step, _GROUPS):
                found.add(path[:depth])
                break
            if below and _is_called(step) and (depth == 0 or _is_inside(below[0])):
                found.add(path[: depth + 1])
    return found


def _optimizer_of(path: Path, optimizers: Collection[Path]) -> Path | None:
    path = split_name(path)
    for depth in range(len(path) - 1, -1, -1):
        # What is not called an optimizer may hold other things too.
        is_inside = _is_inside(path[depth]) or (depth > 0 and _is_called(path[depth - 1]))
        if is_inside and path[:depth] in optimizers:
            return path[:depth]
    return None


def _models(paths: Iterable[Path], optimizers: Collection[Path]) -> dict[Path, Path]:
    """The paths of the models among `paths` of tensors, which no optimizer has, by that of what each is in.

    Deeper than at the top, what is called so is a model where an optimizer stands beside it, or nothing else does.
    """
    found: set[Path] = set()
    alone = True
    for path in paths:
        depth = next((depth for depth, step in enumerate(path[:-1]) if step in WRAPPERS), None)
        if depth is None:
            alone = False
        else:
            found.add(path[: depth + 1])
    if any(len(model) == 1 for model in found):
        found = {model for model in found if len(model) == 1}
    elif not alone:
        beside = {optimizer[:depth] for optimizer in optimizers for depth in range(len(optimizer) + 1)}
        found = {model for model in found if model[:-1] in beside}
    best: dict[Path, Path] = {}
    for model in sorted(found, key=lambda model: WRAPPERS.index(str(model[-1]))):
        best.setdefault(model[:-1], model)
    return best


def _beside(rest: Iterable[Path], tensors: Iterable[Path], optimizers: Collection[Path]) -> set[str | int]:
    """The first steps of tensors that are no weights, where the model's names are at the top.

    Those are: what only trainers have; and where an optimizer has parameters at the top, what it has nothing of.
    """
    top: set[str | int] = set()
    nested: set[str | int] = set()
    for path in rest:
        (nested if len(path) > 1 else top).add(path[0])
    trained = {name for name in map(_parameter_of(optimizers), tensors) if name} if top and nested else set()
    if top & trained:
        modules = {name.split(".", 1)[0] for name in trained}
        return {step for step in nested if step in _TRAINING or str(step) not in modules}
    return {step for step in nested if step in _TRAINING} if top else set()


def _parameter_of(optimizers: Collection[Path]) -> Callable[[Path], str]:
    """Which parameter a path into an optimizer is about, by the path; "" where it does not tell."""

    def parameter(path: Path) -> str:
        path = split_name(path)
        prefix = _optimizer_of(path, optimizers)
        below = () if prefix is None else path[len(prefix) :]
        if len(below) > 2 and below[0] == _STATE:
            return str(below[1])
        name = str(below[0]) if len(below) == 1 else ""
        return name[len(_STATE) + 1 :].rpartition(".")[0] if name.startswith(_STATE + ".") else ""

    return parameter


def below(tree: Any, path: Path) -> Any:
    """What `path` leads to in `tree`; None where it leads nowhere."""
    for step in path:
        if isinstance(tree, list):
            tree = tree[step] if type(step) is int and 0 <= step < len(tree) else None
        else:
            tree = tree.get(step) if isinstance(tree, dict) else None
    return tree


def dotted(path: Path) -> str:
    """A path as one name."""
    return ".".join(map(str, path))


def nest(leaves: Mapping[Path, Any], where: str) -> Any:
    """The dicts and lists that have `leaves` where their paths lead: strings are keys, numbers positions.

    None stands where a list has had something that is not among them. Raises CorruptError for paths that lead through
    a leaf, or positions that no list of theirs has.
    """
    root: dict[str | int, Any] = {}
    inner: list[tuple[dict[str | int, Any], str | int]] = []
    nodes = {id(root)}
    for path, leaf in leaves.items():
        node = root
        for step in path[:-1]:
            if step not in node:
                below: dict[str | int, Any] = {}
                nodes.add(id(below))
                inner.append((node, step))
                node[step] = below
            node = node[step]
            if id(node) not in nodes:
                raise CorruptError(f"{where}: {named(dotted(path))} is inside of a value.")
        if path[-1] in node:
            raise CorruptError(f"{where} has two values at {named(dotted(path))}.")
        node[path[-1]] = leaf
    most = 2 * len(leaves)
    for node, step in reversed(inner):
        node[step] = _container(node[step], most, where)
    return _container(root, most, where)


def _container(node: dict[str | int, Any], most: int, where: str) -> Any:
    """A dict, or the list whose positions are its keys."""
    if not node or all(type(key) is str for key in node):
        return node
    positions = [key for key in node if type(key) is int]
    if len(positions) != len(node) or min(positions) < 0 or max(positions) > most:
        raise CorruptError(f"{where}: the paths of its values are neither those of a dict nor of a list.")
    return [node.get(position) for position in range(max(positions) + 1)]


# ------------------------------------------------------------------------------------------------------ the optimizer


def optimizer_state(trees: Iterable[tuple[str, Any]], weights: Collection[str], where: str) -> dict[str, Any] | None:
    """The optimizers' states by parameter, and their groups: {"state": {name: {key: value}}, "param_groups": […]}.

    `trees` are the optimizers, each with what its parameters' names begin with. Both are nested, or flat, with the
    parameter's name in the key (flatten_optimizer_state_dict); Megatron puts the state before the parameter, which is
    told by the names of the `weights`. None where there is no state. Raises CorruptError where two optimizers have a
    state of the same parameter.
    """
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for prefix, tree in trees:
        if not isinstance(tree, dict):
            continue
        for name, state in _states(tree, weights).items():
            name = prefix + name
            if name in states:
                raise CorruptError(f"{where}: two of its optimizers have a state of {named(name)}.")
            states[name] = state
        groups += ({**group, "params": [prefix + name for name in group["params"]]} for group in _groups(tree))
    return {"state": states, "param_groups": groups} if states else None


def _states(tree: Mapping[Any, Any], weights: Collection[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    nested = tree.get(_STATE)
    if isinstance(nested, dict):
        for name, state in nested.items():
            found[str(name)] = state if isinstance(state, dict) else {_STATE: state}
    elif isinstance(nested, list):
        found.update((str(name), state) for name, state in enumerate(nested) if isinstance(state, dict))
    flat = _flat(tree, _STATE)
    split = _state_first if _is_state_first(flat, weights) else _state_last
    for key, value in flat.items():
        name, state = split(key)
        if name:
            found.setdefault(name, {})[state] = value
    return found


def _state_first(key: str) -> tuple[str, str]:
    state, _, name = key.partition(".")
    return name, state


def _state_last(key: str) -> tuple[str, str]:
    name, _, state = key.rpartition(".")
    return name, state


def _is_state_first(flat: Collection[str], weights: Collection[str]) -> bool:
    """Whether flat keys are of the form <state>.<parameter>, and not <parameter>.<state>."""
    ways = [sum(split(key)[0] in weights for key in flat) for split in (_state_first, _state_last)]
    return ways[0] > ways[1] or (not any(ways) and bool(flat) and all(_state_first(key)[1] in _STATES for key in flat))


def _groups(tree: Mapping[Any, Any]) -> list[dict[str, Any]]:
    nested = tree.get(_GROUPS)
    groups = [
        {**group, "params": [str(name) for name in _listed(group.get("params"))]}
        for group in (nested if isinstance(nested, list) else ())
        if isinstance(group, dict)
    ]
    settings: dict[str, dict[str, Any]] = {}
    for key, value in _flat(tree, _GROUPS).items():
        name, setting = _state_last(key)
        if name:
            settings.setdefault(name, {})[setting] = value
    # Parameters of the same settings were one group, or may as well have been.
    for name, own in settings.items():
        own.pop("params", None)
        group = next((group for group in groups if {**group, "params": None} == {**own, "params": None}), None)
        if group is None:
            group = {**own, "params": []}
            groups.append(group)
        group["params"].append(name)
    return groups


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _flat(tree: Mapping[Any, Any], word: str) -> dict[str, Any]:
    """Entries of flat keys that begin with `word`, such as state.layer.weight.exp_avg, without it."""
    return {
        key[len(word) + 1 :]: value for key, value in tree.items() if type(key) is str and key.startswith(f"{word}.")
    }
