"""The orders of parameters that a state dict itself, or a model's architecture, gives.

Source: torch/nn/modules/module.py (`state_dict` and `named_parameters`: a module's own parameters, then those of its
submodules); peft/tuners/lora/layer.py for the modules that an adapter adds; transformers for `orders.json`, which
scripts/module_orders.py makes from its modules.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ckptconv.structure import keymap
from ckptconv.tensors.dtypes import DTYPE_RANK
from ckptconv.tensors.lazy import LazyTensor

# A module's steps in order, each with the steps below it; * is a number.
_Steps: TypeAlias = "dict[str, _Steps]"
# A position in the order of modules.
_Place: TypeAlias = tuple[int, ...]
_TOKEN = re.compile(r"[^\s().]+|[().]")
# PEFT's prefix of a model's names, and the names that it adds to an adapted module, in the order of the module.
_PEFT = "base_model.model."
_ADAPTED = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
# The name of an adapter in the running model. Files leave it out.
_OF_ADAPTER = re.compile(rf"\.({'|'.join(_ADAPTED)})\.(?!weight$)[^.]+(?=\.weight$|$)")
_WHOLE = re.compile(r"\.modules_to_save\.[^.]+")


# -------------------------------------------------------------------------------------------------- of the save itself


def is_kept(tree: Any) -> bool:
    """Return whether a state dict is certainly in the order of its modules.

    It is if `Module.state_dict` returned it and it names the modules, or if its names follow one another as the modules
    do, and no sorting gives this order.
    """
    if not isinstance(tree, Mapping) or not tree:
        return False
    flat = keymap.flatten(tree)[0]
    modules = getattr(tree, "_metadata", None)
    return follows_modules(flat, modules if isinstance(modules, Mapping) else None)


def follows_modules(tensors: Mapping[str, Any], modules: Iterable[str] | None = None) -> bool:
    """Return whether names are in the order of modules: each module's own names first, then those of its submodules. If
    the names are also sorted, the `modules` in order must show that, and no bias may come before a weight."""
    names = list(tensors)
    paths = [name.split(".") for name in names]
    parents = dict.fromkeys(tuple(path[:-1]) for path in paths)
    if not _is_preorder(path[:-1] for path in paths):
        return False
    if modules is not None:
        known = {tuple(name.split(".")) if name else (): at for at, name in enumerate(modules)}
        places = [known.get(parent, -1) for parent in parents]
        if places == sorted(places) and -1 not in places:
            return not (names == sorted(names) and any(map(_is_turned, names, names[1:])))
        return False
    return len(names) > 1 and names not in [*_sortings(tensors)]


def _is_turned(name: str, following: str) -> bool:
    """Return whether a module's bias comes just before its weight, unlike in torch's modules."""
    return name != following and name.replace("bias", "weight") == following


def _is_preorder(parents: Iterable[Sequence[str]]) -> bool:
    """Return whether the names enter each module once, with its own tensors before those of its submodules."""
    left: set[tuple[str, ...]] = set()
    current: tuple[str, ...] = ()
    for parent in parents:
        module = tuple(parent)
        if module == current:
            continue
        if module in left:
            return False
        shared = next((at for at, pair in enumerate(zip(module, current, strict=False)) if pair[0] != pair[1]), None)
        depth = min(len(module), len(current)) if shared is None else shared
        if depth == len(module):
            return False  # a module's own tensors after those of a submodule
        left.update(current[:end] for end in range(depth + 1, len(current) + 1))
        if any(module[:end] in left for end in range(depth + 1, len(module) + 1)):
            return False
        current = module
    return True


def _sortings(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names as programs sort them."""
    names = sorted(tensors)
    yield names
    yield names[::-1]
    yield sorted(names, key=_natural)
    sized = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
    if len(sized) < len(tensors):
        return
    yield sorted(names, key=lambda name: -DTYPE_RANK.get(sized[name].dtype.name, -1))
    if len({tensor.numel for tensor in sized.values()}) > 1:
        for sign in (1, -1):
            yield sorted(names, key=lambda name: sign * sized[name].numel)
            yield sorted(tensors, key=lambda name: sign * sized[name].numel)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(step), "") if step.isdecimal() else (-1, step) for step in re.split(r"(\d+)", name)]


# --------------------------------------------------------------------------------------------------- of an architecture


@functools.cache
def _catalogue() -> dict[str, str]:
    """Return the order of each architecture, as text: {architecture: order}. @ and a number stand for shared text."""
    from importlib import resources

    catalogue = json.loads(resources.files(__package__).joinpath("orders.json").read_text())
    texts = {architecture: text for names, text in catalogue["orders"].items() for architecture in names.split()}
    return {**texts, **{f"@{at}": text for at, text in enumerate(catalogue["shared"])}}


@functools.cache
def _steps(architecture: str) -> _Steps:
    """Return the modules of an architecture of the catalogue in order."""
    tree: _Steps = {}
    around: list[_Steps] = []
    base = node = tree
    is_below = False
    for token in _tokens(architecture):
        if token == "(":
            around.append(base)
            base = node
        elif token == ")":
            base = around.pop()
        elif token == ".":
            is_below = True
        else:
            node = (node if is_below else base).setdefault(token, {})
            is_below = False
    return tree


def _tokens(name: str) -> Iterator[str]:
    """Yield the steps, points and parentheses of an order, or of a text that orders share."""
    for token in _TOKEN.findall(_catalogue()[name]):
        if token.startswith("@"):
            yield from _tokens(token)
        else:
            yield token


def is_known(architecture: str) -> bool:
    """Return whether the catalogue has an architecture."""
    return architecture in _catalogue() and architecture.isidentifier()


def in_order(architecture: str, names: Iterable[str]) -> list[str]:
    """Return `names`, of a model of an architecture in the catalogue or of PEFT's adapter of it, in the order of the
    architecture's parameters; [] if the architecture lacks some of them."""
    tree = _steps(architecture)
    places = {name: _place(tree, name) for name in names}
    if any(place is None for place in places.values()):
        return []
    return sorted(places, key=lambda name: places[name] or ())


def _place(tree: _Steps, name: str) -> _Place | None:
    """Return the position of a parameter in the order of a model's modules; None if it is not there."""
    adapted = -1
    if name.startswith(_PEFT):
        module, _, adapter_part = name.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")
        if adapter_part in _ADAPTED:
            name, adapted = module, _ADAPTED.index(adapter_part)
        else:
            name = name.removeprefix(_PEFT)
    node = tree
    place: list[int] = []
    for step in name.split("."):
        own_step = step if step in node else "*" if step.isdecimal() else ""
        if own_step not in node:
            return None
        place += [list(node).index(own_step), int(step) if own_step == "*" else 0]
        node = node[own_step]
    if adapted < 0:
        return None if node else tuple(place)
    return (*place, len(node) + adapted) if node else None


def of_files(name: str) -> str:
    """Return the name in files of a parameter of a model with adapters of PEFT."""
    return _WHOLE.sub("", _OF_ADAPTER.sub(r".\1", name))
