"""The places of the optimizers in a training checkpoint, and of the weights next to them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.formats.source import MODEL_KEYS
from ckptconv.options.table import Options
from ckptconv.tensors.lazy import Tagged
from ckptconv.text import name_of

_STATE, _GROUPS = "state", "param_groups"


def optimizers_in(tree: Any, key: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Return the optimizers' state dicts next to a training's weights, which are under `key`, with their names."""
    if isinstance(tree, Mapping) and {*map(type, tree.values())} == {Tagged}:
        return []
    return [
        (name, optimizer)
        for name, value in entries(tree).items()
        if type(value) is not Tagged and name != key
        for optimizer in _several(value)
        if is_optimizer(optimizer) and optimizer[_GROUPS]
    ]


def entries(tree: Any) -> dict[str, Any]:
    """Return the items of a dict, a list or a tuple, by name or number; none for other values."""
    if isinstance(tree, Mapping):
        return {name_of(name): value for name, value in tree.items()}
    return {str(at): value for at, value in enumerate(tree)} if isinstance(tree, (list, tuple)) else {}


def _several(value: Any) -> Iterable[Any]:
    """Return the optimizers in a list, or in a dict by name, or the only one."""
    if isinstance(value, (list, tuple)):
        return value
    is_named = isinstance(value, Mapping) and bool(value) and all(map(is_optimizer, value.values()))
    return value.values() if is_named else [value]


def is_optimizer(value: Any) -> bool:
    """Return whether a value is the state dict of an optimizer."""
    if not isinstance(value, Mapping) or not isinstance(value.get(_STATE), Mapping):
        return False
    groups = value.get(_GROUPS)
    return isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)


def weights_key(tree: Any) -> str:
    """Return the key of the weights in a training checkpoint; in a list with optimizers, of the only other item."""
    if isinstance(tree, (list, tuple)) and (beside := {name for name, _ in optimizers_in(tree)}):
        from ckptconv.structure import keymap

        left = [name for name, value in entries(tree).items() if name not in beside and keymap.flatten(value)[0]]
        return left[0] if len(left) == 1 else ""
    for around in ("", _STATE):  # where Composer has the model and the optimizers
        inner = subtree(tree, around)
        if name := next((key for key in MODEL_KEYS if _holds_names(inner, key)), ""):
            return f"{around}.{name}" if around else name
    return ""


def key_to_add(tree: Any, options: Options) -> str:
    """Return the key of the weights, to be added to the options; "" if one of them begins with it already."""
    key = weights_key(tree) if not options.key else ""
    texts = (options.strip_prefix, *options.include, *options.exclude, *options.rename)
    return "" if any(text.lstrip("^").startswith(key) for text in texts) else key


def _holds_names(tree: Any, key: str) -> bool:
    return isinstance(tree, Mapping) and isinstance(tree.get(key), Mapping) and bool(tree[key])


def subtree(tree: Any, key: str) -> Any:
    """Return the value under `key`, a name or names joined with dots; all if it is ""; {} if there is none."""
    if not key or (isinstance(tree, Mapping) and key in tree):
        return tree[key] if key else tree
    for name in key.split("."):
        tree = entries(tree).get(name, {})
    return tree
