"""What of a state dict is the model and what the optimizer, and the dict put together again of its leaves. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.errors import CorruptError

from .dcp_metadata import Path, named

# Under which of these a training loop puts its model; the first that is there is meant.
WRAPPERS = ("model", "state_dict", "module")
_OPTIMIZER = re.compile(r"optim(?:izer)?s?(?:_states?)?(?:[_.-]?\d+)?")


def model_of(paths: Iterable[Path]) -> str:
    """The key of the model, or "" where it is not under one of its own."""
    found = {path[0] for path in paths if len(path) > 1}
    return next((key for key in WRAPPERS if key in found), "")


def optimizer_of(path: Path) -> str:
    """The key of the optimizer that `path` leads into; "" where it leads elsewhere."""
    # Without planner_data a path is one name, with dots in it.
    first = str(path[0]).split(".", 1)[0] if len(path) == 1 else str(path[0])
    return first if _OPTIMIZER.fullmatch(first) and (len(path) > 1 or first != path[0]) else ""


def first_of(path: Path) -> str:
    """The first key of a path; of an optimizer's that is one name with dots in it, that of the optimizer."""
    return optimizer_of(path) or str(path[0])


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


def optimizer_state(trees: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The optimizers' states by parameter, and their groups: {"state": {name: {key: value}}, "param_groups": […]}.

    Both are nested, or flat, with the parameter's name in the key (flatten_optimizer_state_dict). None where there is
    no state. Raises CorruptError where two optimizers have a state of the same parameter.
    """
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for tree in trees.values():
        if not isinstance(tree, dict):
            continue
        for name, state in _states(tree).items():
            if name in states:
                raise CorruptError(f"{where}: two of its optimizers have a state of {named(name)}.")
            states[name] = state
        groups += _groups(tree)
    return {"state": states, "param_groups": groups} if states else None


def _states(tree: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    nested = tree.get("state")
    if isinstance(nested, dict):
        for name, state in nested.items():
            found[str(name)] = state if isinstance(state, dict) else {"state": state}
    elif isinstance(nested, list):
        found.update((str(name), state) for name, state in enumerate(nested) if isinstance(state, dict))
    for name, key, value in _flat(tree, "state."):
        found.setdefault(name, {})[key] = value
    return found


def _groups(tree: Mapping[Any, Any]) -> list[dict[str, Any]]:
    nested = tree.get("param_groups")
    groups = [
        {**group, "params": [str(name) for name in _listed(group.get("params"))]}
        for group in (nested if isinstance(nested, list) else ())
        if isinstance(group, dict)
    ]
    settings: dict[str, dict[str, Any]] = {}
    for name, key, value in _flat(tree, "param_groups."):
        settings.setdefault(name, {})[key] = value
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


def _flat(tree: Mapping[Any, Any], prefix: str) -> Iterable[tuple[str, str, Any]]:
    """Entries of keys such as state.layer.weight.exp_avg: parameter, key, value."""
    for key, value in tree.items():
        if type(key) is str and key.startswith(prefix):
            name, dot, last = key[len(prefix) :].rpartition(".")
            if dot:
                yield name, last, value
