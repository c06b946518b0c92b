"""Separates model and optimizer in a state dict, rebuilds the dict from its leaves, and reports what is left out.
Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptconv.errors import CorruptError
from ckptconv.features.joining import nesting
from ckptconv.formats.source import MODEL_KEYS, NOT_CONVERTED, THEIR_STATES_ARE_CONVERTED
from ckptconv.text import count_of, quoted, some

# The path of a value: keys of dicts, and indices of lists.
Path: TypeAlias = tuple[str | int, ...]
# Code that walks the tree may recurse. No real state dict is nested this deep.
MAX_DEPTH = 64
# The largest value read, in bytes. Values are held in memory; tensors and long texts in them count little.
MAX_VALUE = 1 << 24
_LONGEST_NAME = 200
# The noun of what is no tensor.
VALUE = "value"

# Megatron numbers several optimizers, in names with dots.
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?s?(?:_states?(?:_dict)?)?(?:[_-]?\d+)?")
_WHOLE_NAME = re.compile(rf"({_OPTIMIZER.pattern})\.(.+)", re.DOTALL)
# The entries of torch's optimizers: nested, or flat with the parameter's name in the key.
_STATE, _GROUPS = "state", "param_groups"
# FSDP's name for several parameters flattened into one; its LOCAL_STATE_DICT has only these.
FLAT_PARAMETER = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?(?=$|\.)")
# Keys of trainers next to a model whose names are at the top. No model has modules with these names.
_TRAINING = frozenset({"train_state", "lr_scheduler", "lr_schedulers", "dataloader", "data_loader", "rng_state"})


def _begins(step: str | int, word: str) -> bool:
    """Return whether `step` is `word`, or a flat key that begins with it."""
    return step == word or (type(step) is str and step.startswith(word + "."))


def _is_inside(step: str | int) -> bool:
    return _begins(step, _STATE) or _begins(step, _GROUPS)


def is_optimizer(step: str | int) -> bool:
    """Return whether `step` is the name of an optimizer."""
    return type(step) is str and _OPTIMIZER.fullmatch(step) is not None


@dataclass
class Roles:
    """The roles of the parts of a state dict.

    `models` maps the path of each container to the path of the model in it. It is empty if the model is everything
    without another role. `optimizers` are the paths of containers of "state" and "param_groups". `training` are the
    first steps of the paths of a trainer's state next to a model whose names are at the top.
    """

    models: dict[Path, Path]
    optimizers: set[Path]
    training: set[str | int]

    @classmethod
    def of(cls, paths: Collection[Path], tensors: Collection[Path]) -> Roles:
        """Return the roles in a state dict with values at `paths`, of which `tensors` are tensors."""
        optimizers = _optimizers(paths)
        others = [path for path in tensors if _optimizer_of(path, optimizers) is None]
        models = _models(others, optimizers)
        return cls(models, optimizers, set() if models else _beside(others, tensors, optimizers))

    def optimizer_of(self, path: Path) -> Path | None:
        """Return the path of the optimizer that `path` leads into, if any."""
        return _optimizer_of(path, self.optimizers)

    @property
    def model(self) -> Path:
        """The path of the only model, if it has a place of its own; else ()."""
        return next(iter(self.models.values())) if len(self.models) == 1 else ()

    def is_model(self, path: Path) -> bool:
        """Return whether `path` leads into the part that is converted."""
        if self.models:
            return any(self.models.get(path[: depth - 1]) == path[:depth] for depth in range(1, len(path)))
        return self.optimizer_of(path) is None and not (len(path) > 1 and path[0] in self.training)

    def part_of(self, path: Path) -> Path:
        """Return the part of the state dict that `path` leads into: an optimizer, or an entry next to the model."""
        optimizer = self.optimizer_of(path)
        if optimizer:
            return optimizer
        parent = self.model[:-1]
        depth = len(parent) if path[: len(parent)] == parent else 0
        return path[: depth + 1]

    def model_beside(self, optimizer: Path) -> Path:
        """Return, if there are several models, the one next to `optimizer`; else ()."""
        above = (optimizer[:depth] for depth in range(len(optimizer), -1, -1)) if len(self.models) > 1 else ()
        return next((self.models[place] for place in above if place in self.models), ())


def split_name(path: Path) -> Path:
    """Return the path of an optimizer's entry with its one dotted name, as without planner data, split into the
    optimizer and the name within it. Return any other path unchanged."""
    match = _WHOLE_NAME.fullmatch(path[0]) if len(path) == 1 and type(path[0]) is str else None
    return (match[1], match[2]) if match else path


def _optimizers(paths: Iterable[Path]) -> set[Path]:
    """Return the paths of all optimizers: containers with an optimizer's name, at the top or with an optimizer's
    entries; and all containers of param_groups."""
    optimizers: set[Path] = set()
    for path in map(split_name, paths):
        for depth, step in enumerate(path):
            below = path[depth + 1 :]
            if below and step in MODEL_KEYS:
                break
            if _begins(step, _GROUPS):
                optimizers.add(path[:depth])
                break
            if below and is_optimizer(step) and (depth == 0 or _is_inside(below[0])):
                optimizers.add(path[: depth + 1])
    return optimizers


def _optimizer_of(path: Path, optimizers: Collection[Path]) -> Path | None:
    path = split_name(path)
    for depth in range(len(path) - 1, -1, -1):
        # A container without an optimizer's name may hold other values too.
        is_inside = _is_inside(path[depth]) or (depth > 0 and is_optimizer(path[depth - 1]))
        if is_inside and path[:depth] in optimizers:
            return path[:depth]
    return None


def _models(paths: Iterable[Path], optimizers: Collection[Path]) -> dict[Path, Path]:
    """Return {path of the container: path of the model} for `paths` of tensors that belong to no optimizer.

    Below the top, a container with a model's name is one only next to an optimizer, or if all paths lead into models.
    """
    models: set[Path] = set()
    alone = True
    for path in paths:
        depth = next((depth for depth, step in enumerate(path[:-1]) if step in MODEL_KEYS), None)
        if depth is None:
            alone = False
        else:
            models.add(path[: depth + 1])
    if any(len(model) == 1 for model in models):
        models = {model for model in models if len(model) == 1}
    elif not alone:
        beside = {optimizer[:depth] for optimizer in optimizers for depth in range(len(optimizer) + 1)}
        models = {model for model in models if model[:-1] in beside}
    best: dict[Path, Path] = {}
    for model in sorted(models, key=lambda model: MODEL_KEYS.index(str(model[-1]))):
        best.setdefault(model[:-1], model)
    return best


def _beside(others: Iterable[Path], tensors: Iterable[Path], optimizers: Collection[Path]) -> set[str | int]:
    """Return the first steps of tensors that are no weights, if the model's names are at the top.

    These are names that only trainers use; and, if an optimizer has parameters at the top, modules without states.
    """
    top: set[str | int] = set()
    nested: set[str | int] = set()
    for path in others:
        (nested if len(path) > 1 else top).add(path[0])
    trained = {name for name in map(_parameter_of(optimizers), tensors) if name} if top and nested else set()
    if top & trained:
        modules = {name.split(".", 1)[0] for name in trained}
        return {step for step in nested if step in _TRAINING or str(step) not in modules}
    return {step for step in nested if step in _TRAINING} if top else set()


def _parameter_of(optimizers: Collection[Path]) -> Callable[[Path], str]:
    """Return a function from a path into an optimizer to its parameter's name; "" if the path does not contain it."""

    def parameter(path: Path) -> str:
        path = split_name(path)
        prefix = _optimizer_of(path, optimizers)
        below = () if prefix is None else path[len(prefix) :]
        if len(below) > 2 and below[0] == _STATE:
            return str(below[1])
        name = str(below[0]) if len(below) == 1 else ""
        return name[len(_STATE) + 1 :].rpartition(".")[0] if name.startswith(_STATE + ".") else ""

    return parameter


def subtree(tree: Any, path: Path) -> Any:
    """Return the value at `path` in `tree`; None if there is none."""
    for step in path:
        if isinstance(tree, list):
            tree = tree[step] if type(step) is int and 0 <= step < len(tree) else None
        else:
            tree = tree.get(step) if isinstance(tree, dict) else None
    return tree


def dotted(path: Path) -> str:
    """Return a path as one name."""
    return ".".join(map(str, path))


def nest(leaves: Mapping[Path, Any], where: str) -> Any:
    """Return the dicts and lists that hold `leaves` at their paths: strings are keys, integers are list indices.

    A list item that is not among the leaves is None. Raise CorruptError for a path that leads through a leaf, and for
    indices that do not form a list.
    """
    tree, inner = nesting.nest(leaves.items(), where, lambda path: named(dotted(path)))
    most = 2 * len(leaves)
    for node, step in reversed(inner):
        node[step] = _container(node[step], most, where)
    return _container(tree, most, where)


def _container(node: dict[str | int, Any], most: int, where: str) -> Any:
    """Return a dict, or the list whose indices are its keys."""
    if not node or all(type(key) is str for key in node):
        return node
    positions = [key for key in node if type(key) is int]
    if len(positions) != len(node) or min(positions) < 0 or max(positions) > most:
        raise CorruptError(f"{where}: the paths of its values are valid neither for a dict nor for a list.")
    return [node.get(position) for position in range(max(positions) + 1)]


def named(name: str) -> str:
    """Return a name as messages show it."""
    return quoted(name, _LONGEST_NAME)


def named_in(where: object, name: str) -> str:
    """Return a name as messages about the checkpoint or file `where` show it."""
    return f"{where}: {named(name)}"


def left_by_key(shown: str, keys: Sequence[str], has_states: bool) -> str:
    """Return the note on parts, `shown` in words, that only their `keys` convert, or --optimizer if it `has_states`."""
    how, these = THEIR_STATES_ARE_CONVERTED if has_states else "", "it" if len(keys) == 1 else "one of these parts"
    return f"{NOT_CONVERTED}{shown}. Use {how}--key {keys[0]} for {these}, or --key . for everything."


@dataclass
class Left:
    """Counts of the rest next to the model, by the key of its part, and by noun; `optimizers` are the keys of
    optimizers."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    optimizers: set[str] = field(default_factory=set)

    def add(self, key: str, noun: str, *, is_state: bool) -> None:
        """Count a tensor or another value in the part `key`; `is_state` is whether it belongs to an optimizer."""
        self.counts.setdefault(key, Counter())[noun] += 1
        if is_state:
            self.optimizers.add(key)

    def without(self, keys: Collection[str]) -> Left:
        return Left({key: counts for key, counts in self.counts.items() if key not in keys}, self.optimizers - {*keys})

    def messages(self) -> tuple[list[str], list[str]]:
        """Return notes and warnings on the rest: tensors outside an optimizer are worth a warning."""
        notes: list[str] = []
        warnings: list[str] = []
        for surprising, messages in ((False, notes), (True, warnings)):
            keys = [
                key
                for key, counts in self.counts.items()
                if (key not in self.optimizers and bool(counts.keys() - {VALUE})) is surprising
            ]
            if keys:
                parts = some(keys, form=lambda key: f"{named(key)} ({_counted(self.counts[key])})")
                messages.append(left_by_key(parts, keys, bool(self.optimizers) and not surprising))
        return notes, warnings


def _counted(counts: Counter[str]) -> str:
    return ", ".join(count_of(count, noun) for noun, count in sorted(counts.items()))
