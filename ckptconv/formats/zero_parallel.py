"""Joining what model-parallel ranks hold: pipeline stages are united, tensor-parallel slices merged. Pure.

Tensor parallelism: which way a parameter was cut is written nowhere but in `universal_checkpoint_info`, as patterns of
names, where the training framework provides it. Source: DeepSpeed's checkpoint/ds_to_universal.py and constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.tensors import Concat, LazyTensor, Narrow, View

from .zero_assemble import Weights
from .zero_layout import Shape

# ------------------------------------------------------------------------------------------------ pipeline stages


def unite_stages(
    stages: Sequence[Weights], layers: Mapping[int, Mapping[str, LazyTensor]], buffers: set[str]
) -> Weights:
    """The stages of a pipeline as one. `layers` is what the layer files hold, by layer; `buffers` the names of buffers.

    A tied parameter is in several stages: the first is kept, and the others must be equal to it.
    """
    whole = stages[0]
    for stage in stages[1:]:
        for name, tensor in stage.trainable.items():
            if name in whole.trainable:
                whole.equal.append((name, whole.trainable[name], tensor))
            else:
                whole.trainable[name] = tensor
        for name, state in stage.states.items():
            whole.states.setdefault(name, state)
        _unite_groups(whole.groups, stage.groups)
        whole.frozen.update(stage.frozen)
        whole.aliases.update(stage.aliases)
        whole.unaccounted.extend(stage.unaccounted)
        whole.warnings.extend(stage.warnings)
    known = {*whole.trainable, *whole.frozen, *whole.aliases}
    for layer, tensors in sorted(layers.items()):
        for inner, tensor in tensors.items():
            name = f"{layer}.{inner}"
            if name in buffers:
                whole.buffers[name] = tensor
            elif name not in known and not _is_tied(inner, tensor, whole.trainable):
                whole.frozen[name] = tensor
    missing = sorted(buffers - set(whole.buffers))
    if missing:
        raise CorruptError(f"{whole.where}: the buffers {', '.join(missing[:5])} are named, and are in no layer file.")
    return whole


def _is_tied(inner: str, tensor: LazyTensor, trainable: Mapping[str, LazyTensor]) -> bool:
    """Whether a layer's tensor is one that is kept among the tied modules, under the name of its key."""
    return any(
        name.startswith("tied_modules.") and name.split(".", 2)[-1] == inner and other.shape == tensor.shape
        for name, other in trainable.items()
    )


def _unite_groups(groups: list[dict[str, Any]], more: Sequence[Mapping[str, Any]]) -> None:
    for index, group in enumerate(more):
        if index < len(groups):
            present = set(groups[index]["params"])
            groups[index]["params"].extend(name for name in group["params"] if name not in present)
        else:
            groups.append(dict(group))


# ------------------------------------------------------------------------------------------------ tensor parallel


@dataclass(frozen=True)
class SubParameters:
    """Parameters that are several, joined along one dimension before they were cut: `sizes` are theirs there."""

    patterns: tuple[str, ...]
    shape: Shape
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Patterns:
    """How parameters were cut for tensor parallelism: regular expressions that match the beginning of names."""

    replicated: tuple[str, ...]
    averaged: tuple[str, ...]
    rows: tuple[str, ...]
    vocabulary: tuple[str, ...]
    halves: tuple[str, ...]
    sub_parameters: tuple[SubParameters, ...]
    vocabulary_size: int | None


_KEYS = {
    "replicated": "tp_replicated_parameter_patterns",
    "averaged": "parameter_to_average_patterns",
    "rows": "parameter_with_row_parallelism_patterns",
    "vocabulary": "vocabulary_parameter_patterns",
    "halves": "parameter_with_2_sub_params_cat_dim_0",
}


def read_patterns(info: Mapping[str, Any], where: str) -> Patterns:
    """What `universal_checkpoint_info` says. Raises CorruptError where that is not what DeepSpeed writes."""
    named: dict[str, Any] = {}
    for field, key in _KEYS.items():
        values = info.get(key) or ()
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
            raise CorruptError(f"{where}: {key} in universal_checkpoint_info is not a list of patterns.")
        named[field] = tuple(values)
    size = info.get("original_vocab_size")
    if size is not None and type(size) is not int:
        raise CorruptError(f"{where}: original_vocab_size in universal_checkpoint_info is not a number.")
    parts = info.get("parameter_with_sub_params") or ()
    if not isinstance(parts, (list, tuple)):
        raise CorruptError(f"{where}: parameter_with_sub_params in universal_checkpoint_info is not a list.")
    named["sub_parameters"] = tuple(_sub_parameters(part, where) for part in parts)
    patterns = Patterns(**named, vocabulary_size=size)
    for pattern in (
        *(p for field in _KEYS for p in named[field]),
        *(p for s in patterns.sub_parameters for p in s.patterns),
    ):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CorruptError(f"{where}: {pattern!r} in universal_checkpoint_info is no pattern: {error}.") from error
        # A repeated group can take a matcher longer than the age of the universe, and names need none.
        if re.search(r"\)[*+{]", pattern):
            raise UnsupportedError(f"{where}: the pattern {pattern!r} in universal_checkpoint_info repeats a group.")
    return patterns


def _sub_parameters(part: Any, where: str) -> SubParameters:
    """{patterns, shape, partition_dim}; a size in the shape that is a tuple lists what was joined there."""
    try:
        patterns, shape, dim = part["patterns"], part["shape"], part["partition_dim"]
        sizes = shape[dim] if isinstance(shape[dim], tuple) else (shape[dim],)
        whole = tuple(sum(size) if isinstance(size, tuple) else int(size) for size in shape)
        return SubParameters(tuple(map(str, patterns)), whole, int(dim), tuple(map(int, sizes)))
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise CorruptError(f"{where}: parameter_with_sub_params holds {part!r:.80}, which is no shape.") from error


def merge_ranks(ranks: Sequence[Weights], patterns: Patterns) -> Weights:
    """The tensor-parallel ranks as one, every parameter and state joined as its name's pattern says."""
    first = ranks[0]
    for index, rank in enumerate(ranks):
        if list(rank.trainable) != list(first.trainable):
            odd = sorted(set(rank.trainable) ^ set(first.trainable))[:3]
            raise CorruptError(
                f"{first.where}: tensor-parallel ranks 0 and {index} do not hold the same parameters "
                f"({', '.join(odd)}).",
                "Convert each for itself with --per-rank.",
            )
    merged = Weights(first.where, first.stage, first.world, aliases=first.aliases, warnings=first.warnings)

    def equal(name: str, tensors: Sequence[LazyTensor]) -> LazyTensor:
        merged.equal.extend((name, tensors[0], other) for other in tensors[1:])
        return tensors[0]

    for kind in ("buffers", "frozen", "trainable"):
        for name in getattr(first, kind):
            slices = [getattr(rank, kind).get(name) for rank in ranks]
            if None in slices:
                raise CorruptError(f"{first.where}: {name!r} is not on every tensor-parallel rank.")
            joined = equal(name, slices) if kind == "buffers" else _join(name, slices, patterns, first.where, equal)
            getattr(merged, kind)[name] = joined
    for name, state in first.states.items():
        shape = first.trainable[name].shape
        merged.states[name] = {
            key: _join(name, [rank.states[name][key] for rank in ranks], patterns, first.where, equal)
            if isinstance(value, LazyTensor) and value.shape == shape and shape
            else value
            for key, value in state.items()
        }
    merged.groups = first.groups
    merged.unaccounted = first.unaccounted
    return merged


def _join(
    name: str,
    slices: Sequence[LazyTensor],
    patterns: Patterns,
    where: str,
    equal: Callable[[str, Sequence[LazyTensor]], LazyTensor],
) -> LazyTensor:
    sub = next((sub for sub in patterns.sub_parameters if _matches(sub.patterns, name)), None)
    try:
        if _matches(patterns.replicated, name):
            joined = equal(name, slices)
        elif _matches(patterns.averaged, name):
            raise UnsupportedError(
                f"{where}: {name!r} is to be the average of its tensor-parallel ranks, which is not supported.",
                "Convert each rank for itself with --per-rank.",
            )
        elif _matches(patterns.halves, name):
            joined = _interleave(slices, 0, [slices[0].shape[0] // 2] * 2)
        elif sub is not None:
            shape = tuple(size // len(slices) if dim == sub.dim else size for dim, size in enumerate(sub.shape))
            shaped = [View(part, part.dtype, shape) for part in slices]
            joined = _interleave(shaped, sub.dim, [size // len(slices) for size in sub.sizes])
        else:
            joined = Concat(tuple(slices), 1 if _matches(patterns.rows, name) else 0)
        if _matches(patterns.vocabulary, name) and patterns.vocabulary_size is not None:
            joined = Narrow(joined, 0, 0, patterns.vocabulary_size)
    except (ValueError, IndexError) as error:
        shapes = ", ".join(str(list(part.shape)) for part in slices)
        raise CorruptError(
            f"{where}: the slices of {name!r}, of shapes {shapes}, cannot be joined as universal_checkpoint_info says: "
            f"{error}.",
            "Convert each rank for itself with --per-rank.",
        ) from error
    return joined


def _interleave(slices: Sequence[LazyTensor], dim: int, sizes: Sequence[int]) -> LazyTensor:
    """Every rank holds a part of each of several parameters: first all parts of the first, then of the second, …"""
    if sum(sizes) != slices[0].shape[dim]:
        raise ValueError(f"parts of {list(sizes)} do not make up {slices[0].shape[dim]}")
    parts: list[LazyTensor] = []
    start = 0
    for size in sizes:
        parts.extend(Narrow(part, dim, start, size) for part in slices)
        start += size
    return Concat(tuple(parts), dim)


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)
