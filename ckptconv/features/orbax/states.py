"""Takes the states of optax's optimizers apart by parameter. Pure.

Source: optax/_src/transform.py. A chain is a tuple of states, each a named tuple; one with a value for each parameter
has the tree of the parameters in it, as `mu` and `nu` of Adam are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.tensors.lazy import LazyTensor

_PARAMS = "params"
# Stands in the place of a state in what is left of the tree.
_TAKEN = "state"


def by_parameter(tree: Any, names: Iterable[tuple[str, ...]]) -> dict[str, Any] | None:
    """Return {"state": {parameter: {state: tensor}}, "param_groups": [one]} of the tree of an optimizer's states; None
    if no state is of parameters. `names` are the keys of each parameter.

    The group has as `opt_state` what is left of the tree, with the name of a state in the place of each.
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
    own = {name: state for name, state in states.items() if state}
    group = {"params": [".".join(keys) for keys in sorted(known)], "opt_state": left}
    return {"state": own, "param_groups": [group]}


def _without(node: Any, known: set[tuple[str, ...]], at: tuple[str, ...], taken: list[Any]) -> Any:
    """Return `node`, which is at `at`, without the trees of parameters in it, which go to `taken`."""
    if not isinstance(node, (dict, list)):
        return node
    own = _leaves(node)
    if own and own.keys() <= known:
        keys = at
        while keys[-1:] == (_PARAMS,):
            keys = keys[:-1]
        taken.append((keys, own))
        return f"{_TAKEN} {'.'.join(keys)}"
    if isinstance(node, dict):
        return {key: _without(value, known, (*at, key), taken) for key, value in node.items()}
    return [_without(value, known, (*at, str(index)), taken) for index, value in enumerate(node)]


def _leaves(node: Mapping[str, Any] | list[Any]) -> dict[tuple[str, ...], Any]:
    """Return what is in a tree by its keys; {} if it has a value that is neither a tensor nor absent."""
    found: dict[tuple[str, ...], Any] = {}
    stack: list[tuple[tuple[str, ...], Any]] = [((), node)]
    while stack:
        at, each = stack.pop()
        if isinstance(each, (dict, list)):
            pairs = each.items() if isinstance(each, dict) else ((str(index), one) for index, one in enumerate(each))
            stack += [((*at, key), value) for key, value in pairs]
        elif isinstance(each, LazyTensor):
            found[at] = each
        elif each is not None:
            return {}
    return found
