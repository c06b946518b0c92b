"""The orders of parameters that a state dict itself, or a model's architecture, tells.

Source: torch/nn/modules/module.py (`state_dict` and `named_parameters`: a module's own, then those of the modules in
it); peft/tuners/lora/layer.py for what an adapter puts into a module; transformers for `orders.json`, which
scripts/module_orders.py makes of its modules.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ckptconv.structure import keymap
from ckptconv.tensors.dtypes import DTYPE_RANK, DType
from ckptconv.tensors.lazy import LazyTensor, same_bytes

# A module's steps in order, each with those below it; * is a number.
_Steps: TypeAlias = "dict[str, _Steps]"
# A position in the order of modules.
_Place: TypeAlias = tuple[int, ...]
# What torch keeps for the running statistics of a normalization, all together: buffers, and no parameters.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_TOKEN = re.compile(r"[^\s().]+|[().]")
# What PEFT puts before the names of a model, and into a module that it adapts, in the order of the module.
_PEFT = "base_model.model."
_ADAPTED = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
# The name of an adapter in the running model, which files leave out.
_OF_ADAPTER = re.compile(rf"\.({'|'.join(_ADAPTED)})\.(?!weight$)[^.]+(?=\.weight$|$)")
_WHOLE = re.compile(r"\.modules_to_save\.[^.]+")


def parameters(model: Mapping[str, Any]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return what may be parameters: floating and complex tensors, a tied one once, without the statistics of
    normalizations; and the other names of tied ones, {alias: name}."""
    found: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.items():
        if isinstance(tensor, LazyTensor) and may_be_trained(tensor.dtype) and not is_statistic(name, model):
            key = same_bytes(tensor)
            kept = found.setdefault(name if key is None else key, name)
            if kept != name:
                aliases[name] = kept
    return {name: model[name] for name in found.values()}, aliases


def may_be_trained(dtype: DType) -> bool:
    """Whether a parameter of a dtype has gradients."""
    return dtype.kind in ("f", "c")


def is_statistic(name: str, names: Iterable[str]) -> bool:
    """Whether a tensor is certainly a buffer: one of the running statistics of a module that has them all."""
    module, _, own = name.rpartition(".")
    prefix = f"{module}." if module else ""
    return own in _STATISTICS and all(f"{prefix}{each}" in names for each in _STATISTICS)


# -------------------------------------------------------------------------------------------------- of the save itself


def is_kept(tree: Any) -> bool:
    """Whether a state dict is certainly in the order of its modules: one of `Module.state_dict`, which names these, or
    one whose names follow one another as theirs do and are sorted in no way."""
    if not isinstance(tree, Mapping) or not tree:
        return False
    flat = keymap.flatten(tree)[0]
    modules = getattr(tree, "_metadata", None)
    return follows_modules(flat, modules if isinstance(modules, Mapping) else None)


def follows_modules(tensors: Mapping[str, Any], modules: Iterable[str] | None = None) -> bool:
    """Whether names are in the order of modules: each module's own first, then those of each module in it. Of names
    that are also sorted, the `modules` in order must tell that, and no bias may come before a weight."""
    names = list(tensors)
    paths = [name.split(".") for name in names]
    parents = dict.fromkeys(tuple(path[:-1]) for path in paths)
    if not _is_preorder(path[:-1] for path in paths):
        return False
    if modules is not None:
        known = {tuple(name.split(".")) if name else (): at for at, name in enumerate(modules)}
        places = [known.get(each, -1) for each in parents]
        if places == sorted(places) and -1 not in places:
            return not (names == sorted(names) and any(map(_is_turned, names, names[1:])))
        return False
    return len(names) > 1 and names not in [*_sortings(tensors)]


def _is_turned(one: str, other: str) -> bool:
    """Whether a module's bias comes just before its weight: torch's modules have them the other way."""
    return one != other and one.replace("bias", "weight") == other


def _is_preorder(parents: Iterable[Sequence[str]]) -> bool:
    """Whether modules are entered once each, and have their own tensors before those of modules in them."""
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
            return False  # a module's own after those of one in it
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
    sized = {name: each for name, each in tensors.items() if isinstance(each, LazyTensor)}
    if len(sized) < len(tensors):
        return
    yield sorted(names, key=lambda name: -DTYPE_RANK.get(sized[name].dtype.name, -1))
    if len({each.numel for each in sized.values()}) > 1:
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

    told = json.loads(resources.files(__package__).joinpath("orders.json").read_text())
    texts = {architecture: text for names, text in told["orders"].items() for architecture in names.split()}
    return {**texts, **{f"@{at}": text for at, text in enumerate(told["shared"])}}


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
    """Yield the steps, points and parentheses of an order, or of what orders share."""
    for token in _TOKEN.findall(_catalogue()[name]):
        if token.startswith("@"):
            yield from _tokens(token)
        else:
            yield token


def is_known(architecture: str) -> bool:
    """Whether the catalogue has an architecture."""
    return architecture in _catalogue() and architecture.isidentifier()


def in_order(architecture: str, names: Iterable[str]) -> list[str]:
    """Return `names`, of a model of an architecture in the catalogue or of PEFT's adapter of it, in the order of its
    parameters; [] if it has not all of them."""
    tree = _steps(architecture)
    places = {name: _place(tree, name) for name in names}
    if any(place is None for place in places.values()):
        return []
    return sorted(places, key=lambda name: places[name] or ())


def _place(tree: _Steps, name: str) -> _Place | None:
    """Return where a parameter is in the order of a model's modules; None if it is not in it."""
    adapted = -1
    if name.startswith(_PEFT):
        module, _, own = name.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")
        if own in _ADAPTED:
            name, adapted = module, _ADAPTED.index(own)
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
    """Return the name that files have for a parameter of a model with adapters of PEFT."""
    return _WHOLE.sub("", _OF_ADAPTER.sub(r".\1", name))
