"""Splits the states of optax's optimizers by parameter. Pure.

Source: optax/_src/transform.py. A chain is a tuple of states, each a named tuple. A state with a value for each
parameter has a tree of the parameters' form, such as `mu` and `nu` of Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.tensors.lazy import LazyTensor

_PARAMS = "params"
# Replaces a state in the rest of the tree.
_TAKEN = "state"


def by_parameter(tree: Any, names: Iterable[tuple[str, ...]]) -> dict[str, Any] | None:
    """Return {"state": {parameter: {state: tensor}}, "param_groups": [one]} for the tree of an optimizer's states; None
    if no state belongs to parameters. `names` are the keys of each parameter.

    The group's `opt_state` is the rest of the tree, with the name of each state in its place.
    """
    known = set(names)
    taken: list[tuple[tuple[str, ...], dict[tuple[str, ...], Any]]] = []
    left = _without(tree, known, (), taken)
    if not taken:
        return None
    short = [keys[-1] for keys, _ in taken]
    called = {keys: keys[-1] if short.count(keys[-1]) == 1 else ".".join(keys) for keys, _ in taken}
    states: dict[str, dict[str, Any]] = {".".join(keys): {} for keys in names if keys in known}
    for keys, tensors in taken:
        for parameter, tensor in tensors.items():
            states.setdefault(".".join(parameter), {})[called[keys]] = tensor
    filled = {name: state for name, state in states.items() if state}
    group = {"params": [".".join(keys) for keys in sorted(known)], "opt_state": left}
    return {"state": filled, "param_groups": [group]}


def _without(node: Any, known: set[tuple[str, ...]], at: tuple[str, ...], taken: list[Any]) -> Any:
    """Return `node`, which is at `at`, without the trees of parameters in it; these go to `taken`."""
    if not isinstance(node, (dict, list)):
        return node
    leaves = _leaves(node)
    if leaves and leaves.keys() <= known:
        keys = at
        while keys[-1:] == (_PARAMS,):
            keys = keys[:-1]
        taken.append((keys, leaves))
        return f"{_TAKEN} {'.'.join(keys)}"
    if isinstance(node, dict):
        return {key: _without(value, known, (*at, key), taken) for key, value in node.items()}
    return [_without(value, known, (*at, str(index)), taken) for index, value in enumerate(node)]


def _leaves(node: Mapping[str, Any] | list[Any]) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a tree by their keys; {} if one of them is neither a tensor nor absent."""
    leaves: dict[tuple[str, ...], Any] = {}
    stack: list[tuple[tuple[str, ...], Any]] = [((), node)]
    while stack:
        at, inner = stack.pop()
        if isinstance(inner, (dict, list)):
            pairs = (
                inner.items() if isinstance(inner, dict) else ((str(index), child) for index, child in enumerate(inner))
            )
            stack += [((*at, key), value) for key, value in pairs]
        elif isinstance(inner, LazyTensor):
            leaves[at] = inner
        elif inner is not None:
            return {}
    return leaves
