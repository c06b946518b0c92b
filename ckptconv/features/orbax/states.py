"""Splits the states of optax's optimizers by parameter. Pure.

Source: optax/_src/transform.py. A chain is a tuple of states, each a named tuple. A state with a value for each
parameter has a tree of the parameters' form, such as `mu` and `nu` of Adam.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from ckptconv.tensors.lazy import LazyTensor

_PARAMS = "params"
# Replaces a state in the rest of the tree; and the name of a state that is the whole tree.
_TAKEN = "state"


def by_parameter(tree: Any, names: Iterable[tuple[str, ...]]) -> dict[str, Any] | None:
    """Return {"state": {parameter: {state: tensor}}, "param_groups": [one]} for the tree of an optimizer's states; None
    if no state belongs to parameters. `names` are the keys of each parameter.

    The group's `opt_state` is the rest of the tree, with the name of each state in its place.
    """
    known = dict.fromkeys(names)
    taken: list[tuple[tuple[str, ...], dict[tuple[str, ...], Any]]] = []
    left = _without(tree, known.keys(), (), taken)
    if not taken:
        return None
    times = Counter(keys[-1:] for keys, _ in taken)
    states: dict[str, dict[str, Any]] = {".".join(keys): {} for keys in known}
    for keys, tensors in taken:
        called = ".".join(keys[-1:] if times[keys[-1:]] == 1 else keys) or _TAKEN
        for parameter, tensor in tensors.items():
            states[".".join(parameter)][called] = tensor
    filled = {name: state for name, state in states.items() if state}
    group = {"params": [".".join(keys) for keys in sorted(known)], "opt_state": left}
    return {"state": filled, "param_groups": [group]}


def _without(node: Any, known: Set[tuple[str, ...]], at: tuple[str, ...], taken: list[Any]) -> Any:
    """Return `node`, which is at `at`, without the trees of parameters in it; these go to `taken`."""
    if not isinstance(node, (dict, list)):
        return node
    leaves = dict(_leaves(node, ()))
    if leaves and leaves.keys() <= known and all(isinstance(leaf, LazyTensor) for leaf in leaves.values()):
        keys = at
        while keys[-1:] == (_PARAMS,):
            keys = keys[:-1]
        taken.append((keys, leaves))
        return f"{_TAKEN} {'.'.join(keys)}"
    without = {key: _without(value, known, (*at, key), taken) for key, value in _items(node)}
    return without if isinstance(node, dict) else [*without.values()]


def _leaves(node: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a tree that are not None, each with its keys, which begin with `at`."""
    if isinstance(node, (dict, list)):
        for key, value in _items(node):
            yield from _leaves(value, (*at, key))
    elif node is not None:
        yield at, node


def _items(node: Mapping[str, Any] | list[Any]) -> Iterable[tuple[str, Any]]:
    return node.items() if isinstance(node, Mapping) else ((str(index), value) for index, value in enumerate(node))
