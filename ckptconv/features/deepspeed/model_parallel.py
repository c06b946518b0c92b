"""Joins the weights of model-parallel ranks: unites pipeline stages, and merges tensor-parallel slices.

Only `universal_checkpoint_info` says how a parameter was cut for tensor parallelism. It holds patterns of names, and
exists if the training framework provides it. Sources: DeepSpeed's runtime/pipe/module.py, checkpoint/affine.py,
checkpoint/ds_to_universal.py and constants.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.deepspeed.partitions import TIED, Shape
from ckptconv.features.deepspeed.weights import Weights
from ckptconv.features.regexes.regexes import ExpressionError, LimitsError, first_matches
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Convert, Equal, Inline, LazyTensor, Narrow, View
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.text import brief, count_of

_T = TypeVar("_T")

PER_RANK = "Convert each rank separately with --per-rank."


def _unjoined(message: str) -> UnsupportedError:
    """Return the error for tensor-parallel ranks that cannot be joined."""
    return UnsupportedError(message, PER_RANK)


# ------------------------------------------------------------------------------------------------ pipeline stages

# Bytes of each parameter that are compared to tell whether a layer is a tied module.
HEAD = 1 << 16


def unite_stages(
    stages: Sequence[Weights],
    layers: Mapping[int, Mapping[str, LazyTensor]],
    buffers: set[str],
    head: Callable[[LazyTensor, int], bytes],
) -> Weights:
    """Unite the stages of a pipeline, in the first of them.

    `layers` holds the tensors of the layer files, by layer; `buffers` the names of buffers; `head` reads the first
    bytes of a tensor. Of a tied parameter in several stages the first is kept, and the others must be equal to it. The
    layer files repeat every parameter in the model's dtype, by names relative to the layer. A parameter that no
    optimizer has is frozen.
    """
    whole = stages[0]
    for stage in stages[1:]:
        for name, tensor in stage.trainable.items():
            if name in whole.trainable:
                whole.equal.append((name, whole.trainable[name], tensor))
            else:
                whole.trainable[name] = tensor
        for name, state in stage.states.items():
            kept = whole.states.setdefault(name, state)
            whole.equal_states.extend(
                (f"{name}.{key}", kept[key], value)
                for key, value in state.items()
                if kept is not state and isinstance(value, LazyTensor) and isinstance(kept.get(key), LazyTensor)
            )
        _unite_groups(whole.groups, stage.groups)
        whole.frozen.update(stage.frozen)
        whole.buffers.update(stage.buffers)
        whole.aliases.update(stage.aliases)
        whole.equal.extend(stage.equal)
        whole.equal_states.extend(stage.equal_states)
        whole.unaccounted.extend(stage.unaccounted)
        whole.warnings.extend(stage.warnings)
        whole.states_error = whole.states_error or stage.states_error
    tied = _tied_modules(whole.trainable)
    rest = whole.frozen if whole.stage != 0 else whole.trainable
    for layer, tensors in sorted(layers.items()):
        module = next((key for key, inside in tied.items() if _is_tied(tensors, inside, head)), None)
        for inner, tensor in tensors.items():
            name = f"{layer}.{inner}" if module is None else f"{TIED}{module}.{inner}"
            if name in buffers:
                whole.buffers.setdefault(name, tensor)
            elif name not in whole.trainable and name not in whole.aliases:
                rest.setdefault(name, tensor)
    missing = sorted(buffers - set(whole.buffers))
    if missing:
        raise CorruptError(
            f"{whole.where}: buffer_names lists {', '.join(missing[:5])}, but no layer file contains these names."
        )
    return whole


def _tied_modules(trainable: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Return the modules that several layers share: by key, their parameters by names relative to the module."""
    modules: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in trainable.items():
        if name.startswith(TIED):
            key, _, inner = name[len(TIED) :].partition(".")
            modules.setdefault(key, {})[inner] = tensor
    return modules


def _is_tied(
    layer: Mapping[str, LazyTensor], module: Mapping[str, LazyTensor], head: Callable[[LazyTensor, int], bytes]
) -> bool:
    """Return whether `layer` is the tied `module`, whose name its parameters then have. No file records it.

    A layer is tied if it has all parameters of the module, and they begin like the module's master weights, rounded.
    """
    for inner, master in module.items():
        tensor = layer.get(inner)
        if tensor is None or tensor.shape != master.shape:
            return False
        if tensor.dtype.name == master.dtype.name:
            rounded = master
        else:
            rounded = Convert(master, Cast(master.dtype.name, tensor.dtype.name), DTYPES[tensor.dtype.name])
        if head(tensor, HEAD) != head(rounded, HEAD):
            return False
    return True


def _unite_groups(groups: list[dict[str, Any]], more: Sequence[Mapping[str, Any]]) -> None:
    for index, group in enumerate(more):
        if index < len(groups):
            present = set(groups[index]["params"])
            groups[index]["params"].extend(name for name in group["params"] if name not in present)
        else:
            groups.append(dict(group))


# -------------------------------------------------------------------------------------------- patterns of names


class Table(Generic[_T]):
    """Values by patterns of names: regular expressions that match at the start of a name."""

    def __init__(self, entries: Iterable[tuple[str, _T]]) -> None:
        self._found: dict[str, _T] = {}
        self.patterns: list[str] = []
        self._values: list[_T] = []
        for pattern, value in entries:
            # AutoTP writes one exact pattern for every parameter: thousands of them.
            name = re.sub(r"\\(.)", r"\1", pattern[1:-1], flags=re.DOTALL)
            if pattern == f"^{re.escape(name)}$":
                self._found.setdefault(name, value)
            else:
                self.patterns.append(pattern)
                self._values.append(value)

    def learn(self, names: Iterable[str], first: Iterable[int | None]) -> None:
        """Take the number of the first pattern that matches each of these names, if any does."""
        for name, number in zip(names, first, strict=True):
            if number is not None:
                self._found.setdefault(name, self._values[number])

    def get(self, name: str) -> _T | None:
        """Return the value of the first pattern that matches `name`, or None."""
        return self._found.get(name)


def _learn(tables: Sequence[Table[Any]], names: Sequence[str], where: str) -> None:
    """Match the patterns of all tables with these names. Raise CorruptError for one that is none, UnsupportedError if
    that takes too long."""
    used = [table for table in tables if table.patterns]
    try:
        matches = first_matches([table.patterns for table in used], names) if used else []
    except ExpressionError as error:
        wrong = brief(used[error.at].patterns[error.number], 80)
        raise CorruptError(f"{where}: {wrong} in universal_checkpoint_info is not a valid pattern: {error}.") from None
    except LimitsError:
        raise _unjoined(
            f"{where}: matching the patterns in universal_checkpoint_info with {len(names)} names takes too long."
        ) from None
    for table, first in zip(used, matches, strict=True):
        table.learn(names, first)


# ------------------------------------------------------------------------------------------------ tensor parallel


class Piece(NamedTuple):
    """A part of a parameter: `length` indices from `start` of the whole, and from `at` of the slice of `rank`."""

    start: int
    length: int
    rank: int
    at: int


@dataclass(frozen=True)
class PieceMap:
    """The positions of a parameter's slices along dimension `dim`. `slices` are their shapes, by rank."""

    dim: int
    shape: Shape
    slices: tuple[Shape, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SubParameters:
    """Several parameters that were joined along `dim` before they were cut.

    `shape` is that in which they are joined; -1 stands for the remaining elements. `sizes` lists the parameters' sizes
    along `dim`, or is their number. `widths` gives each rank's share of each, by sub-parameter and rank; None if all
    ranks have equal shares.
    """

    shape: Shape
    dim: int
    sizes: tuple[int, ...] | int
    widths: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class Patterns:
    """The tensor-parallel division of parameters: values by patterns of parameter names."""

    replicated: Table[bool]
    averaged: Table[bool]
    rows: Table[bool]
    vocabulary: Table[bool]
    halves: Table[bool]
    sub_parameters: Table[SubParameters]
    maps: Table[Any]
    unsupported: Table[str]
    vocabulary_size: int | None


_LISTS = {
    "replicated": "tp_replicated_parameter_patterns",
    "averaged": "parameter_to_average_patterns",
    "rows": "parameter_with_row_parallelism_patterns",
    "vocabulary": "vocabulary_parameter_patterns",
    "halves": "parameter_with_2_sub_params_cat_dim_0",
}


def read_patterns(info: Mapping[str, Any], names: Sequence[str], where: str) -> Patterns:
    """Read what `universal_checkpoint_info` says of parameters with these names.

    Raises CorruptError where it is not what DeepSpeed writes, UnsupportedError for patterns that take too long.
    """
    tables: dict[str, Any] = {}
    for name, key in _LISTS.items():
        values = info.get(key) or ()
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
            raise CorruptError(f"{where}: {key} in universal_checkpoint_info is not a list of patterns.")
        tables[name] = Table((value, True) for value in values)
    size = info.get("original_vocab_size")
    if size is not None and (type(size) is not int or size < 0):
        raise CorruptError(f"{where}: original_vocab_size in universal_checkpoint_info is {brief(size)}, not a size.")
    parts = info.get("parameter_with_sub_params") or ()
    if not isinstance(parts, (list, tuple)):
        raise CorruptError(f"{where}: parameter_with_sub_params in universal_checkpoint_info is not a list.")
    widths = _dict(info, "sub_param_shard_widths", where)
    maps = _dict(info, "affine_map", where)
    if maps and maps.get("version", 1) != 1:
        raise _unjoined(f"{where}: its affine_map has the unknown version {brief(maps['version'])}.")
    patterns = Patterns(
        **tables,
        sub_parameters=Table(entry for part in parts for entry in _sub_parameters(part, widths, where)),
        maps=Table(_dict(maps, "params", where).items()),
        unsupported=Table(
            (key, str(why)) for key, why in _dict(info, "autotp_unsupported_parameter_patterns", where).items()
        ),
        vocabulary_size=size,
    )
    _learn([table for table in vars(patterns).values() if isinstance(table, Table)], names, where)
    return patterns


def _dict(info: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = info.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CorruptError(f"{where}: {key} in universal_checkpoint_info is not a dict with string keys.")
    return value


def _sub_parameters(part: Any, widths: Mapping[str, Any], where: str) -> Iterator[tuple[str, SubParameters]]:
    """Read {patterns, shape, partition_dim}. A tuple in the shape lists the sizes that were joined there."""
    try:
        shape, dim = part["shape"], part["partition_dim"]
        listed = isinstance(shape[dim], (tuple, list))
        sizes = tuple(map(int, shape[dim])) if listed else int(shape[dim])
        whole = tuple(sum(size) if isinstance(size, (tuple, list)) else int(size) for size in shape)
        for pattern in part["patterns"]:
            held = widths.get(pattern)
            held = None if held is None else tuple(tuple(map(int, by_rank)) for by_rank in held)
            yield str(pattern), SubParameters(whole, int(dim), sizes, held)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise CorruptError(
            f"{where}: parameter_with_sub_params contains {brief(part, 80)}, which is not a valid entry."
        ) from error


def merge_ranks(ranks: Sequence[Weights], patterns: Patterns) -> Weights:
    """Merge tensor-parallel ranks: join every parameter and state as the pattern for its name says."""
    merger = _Merger(ranks, patterns)
    merger.check_names()
    first = ranks[0]
    merged = merger.merged
    # A rank without a part of an unevenly cut parameter may list it as frozen.
    names = dict.fromkeys(name for rank in ranks for name in rank.trainable)
    for name in names:
        merged.trainable[name] = merger.join(name, [_parameter(rank, name) for rank in ranks])
    for name in first.frozen:
        if name not in names:
            merged.frozen[name] = merger.join(name, [_parameter(rank, name) for rank in ranks])
    for name in first.buffers:
        merged.buffers[name] = merger.equal(name, [rank.buffers[name] for rank in ranks])
    # Each rank sums the gradients of a replicated parameter by itself, so its states may differ by a rounding. Those of
    # the first rank are kept.
    merger.pairs = merged.alike
    for name in names:
        merged.states[name] = dict(merger.states(name))
    merged.states = {name: state for name, state in merged.states.items() if state}
    merged.groups = [
        {**group, "params": list(dict.fromkeys(name for rank in ranks for name in _members(rank.groups, index)))}
        for index, group in enumerate(first.groups)
    ]
    return merged


def _parameter(rank: Weights, name: str) -> LazyTensor:
    return rank.trainable[name] if name in rank.trainable else rank.frozen[name]


def _members(groups: Sequence[Mapping[str, Any]], index: int) -> list[str]:
    return groups[index]["params"] if index < len(groups) else []


@dataclass
class _Merger:
    ranks: Sequence[Weights]
    patterns: Patterns
    merged: Weights = field(init=False)
    pairs: list[Equal] = field(init=False)

    def __post_init__(self) -> None:
        first = self.ranks[0]
        self.merged = Weights(first.where, first.stage, first.world, aliases=first.aliases)
        self.merged.unaccounted = list(dict.fromkeys(name for rank in self.ranks for name in rank.unaccounted))
        self.merged.warnings = [warning for rank in self.ranks for warning in rank.warnings]
        self.merged.states_error = next((rank.states_error for rank in self.ranks if rank.states_error), None)
        self.merged.equal = [pair for rank in self.ranks for pair in rank.equal]
        self.merged.equal_states = [pair for rank in self.ranks for pair in rank.equal_states]
        self.pairs = self.merged.equal

    @property
    def where(self) -> str:
        return self.merged.where

    def check_names(self) -> None:
        first = self.ranks[0]
        for index, rank in enumerate(self.ranks):
            for mine, other in (
                ({*rank.trainable, *rank.frozen}, {*first.trainable, *first.frozen}),
                (set(rank.buffers), set(first.buffers)),
            ):
                if mine != other:
                    odd = sorted(mine ^ other)[:3]
                    raise CorruptError(
                        f"{self.where}: tensor-parallel ranks 0 and {index} do not contain the same tensors: they "
                        f"differ in {', '.join(odd)}.",
                        PER_RANK,
                    )

    def equal(self, name: str, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """Return the first of `tensors`, and note that the others must equal it."""
        self.pairs.extend((name, tensors[0], other) for other in tensors[1:])
        return tensors[0]

    def states(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the joined optimizer states of a parameter."""
        held = [(_parameter(rank, name), rank.states.get(name, {})) for rank in self.ranks]
        fullest = max((state for _, state in held), key=len)
        for key, value in fullest.items():
            slices: list[Any] = [
                # A rank without elements of the parameter has no state for it.
                state.get(key, Inline(b"", value.dtype, tensor.shape) if _is_empty(tensor, value) else None)
                for tensor, state in held
            ]
            if not all(
                isinstance(part, LazyTensor) and part.shape == tensor.shape
                for part, (tensor, _) in zip(slices, held, strict=True)
            ):
                yield key, value
                continue
            before = len(self.pairs)
            joined = self.join(name, slices) if any(tensor.shape for tensor, _ in held) else self.equal(name, slices)
            self.pairs[before:] = [(f"{name}.{key}", one, other) for _, one, other in self.pairs[before:]]
            yield key, joined

    def join(self, name: str, slices: Sequence[LazyTensor]) -> LazyTensor:
        """Join the slices of all ranks into one tensor."""
        patterns = self.patterns
        reason = patterns.unsupported.get(name)
        if reason is not None:
            raise _unjoined(f"{self.where}: cannot determine how {name!r} was split: {reason}.")
        try:
            placed = patterns.maps.get(name)
            if placed is not None:
                return self._join_pieces(name, slices, read_map(placed, len(slices)))
            joined = self._join_as_named(name, slices)
            if patterns.vocabulary.get(name) and patterns.vocabulary_size is not None and joined.shape:
                joined = Narrow(joined, 0, 0, min(patterns.vocabulary_size, joined.shape[0]))
        except (ValueError, IndexError) as error:
            shapes = ", ".join(str(list(part.shape)) for part in slices)
            raise CorruptError(
                f"{self.where}: the slices of {name!r}, of shapes {shapes}, cannot be joined as "
                f"universal_checkpoint_info specifies: {error}.",
                PER_RANK,
            ) from error
        return joined

    def _join_as_named(self, name: str, slices: Sequence[LazyTensor]) -> LazyTensor:
        patterns = self.patterns
        if patterns.replicated.get(name):
            return self.equal(name, slices)
        if patterns.averaged.get(name):
            raise _unjoined(
                f"{self.where}: {name!r} should be averaged over the tensor-parallel ranks, which is not supported."
            )
        if patterns.halves.get(name):
            return _interleave(slices, 0, [[part.shape[0] // 2 for part in slices]] * 2)
        sub = patterns.sub_parameters.get(name)
        if sub is not None:
            return _join_sub_parameters(slices, sub)
        if not slices[0].shape:
            raise ValueError("a scalar cannot be split, but it is not marked as replicated")
        return Concat(tuple(slices), 1 if patterns.rows.get(name) else 0)

    def _join_pieces(self, name: str, slices: Sequence[LazyTensor], placed: PieceMap) -> LazyTensor:
        shaped = [_viewed(part, shape) for part, shape in zip(slices, placed.slices, strict=True)]
        if not placed.shape:
            return self.equal(name, shaped)
        parts: list[tuple[Piece, LazyTensor]] = []
        for piece in sorted(placed.pieces):
            tensor = Narrow(shaped[piece.rank], placed.dim, piece.at, piece.length)
            end = parts[-1][0].start + parts[-1][0].length if parts else 0
            if piece.start == end:
                parts.append((piece, tensor))
            elif parts and piece[:2] == parts[-1][0][:2]:
                self.equal(name, [parts[-1][1], tensor])
            else:
                raise ValueError(
                    f"its pieces fill dimension {placed.dim} up to {end}, but the next begins at {piece.start}"
                )
        joined = Concat(tuple(tensor for _, tensor in parts), placed.dim) if parts else slices[0]
        if joined.shape != placed.shape:
            raise ValueError(f"its joined pieces have the shape {list(joined.shape)}, not {list(placed.shape)}")
        return joined


def _is_empty(tensor: LazyTensor, state: Any) -> bool:
    return tensor.numel == 0 and isinstance(state, LazyTensor) and bool(state.shape)


def _viewed(tensor: LazyTensor, shape: Shape) -> LazyTensor:
    return tensor if tensor.shape == shape else View(tensor, tensor.dtype, shape)


def _join_sub_parameters(slices: Sequence[LazyTensor], sub: SubParameters) -> LazyTensor:
    ranks, dim, sizes = len(slices), sub.dim, sub.sizes
    if not 0 <= dim < len(sub.shape):
        raise ValueError(f"dimension {brief(dim)} of {brief(list(sub.shape))} does not exist")
    if isinstance(sizes, int):
        # Before DeepSpeed wrote tuples, an int was the size of one parameter, or the number of several equal ones.
        whole = sum(part.shape[dim] for part in slices) if len(slices[0].shape) > dim else sizes
        if sizes < 1 or whole % sizes:
            raise ValueError(f"size {brief(whole)} is not divisible into {brief(sizes)} equal sub-parameters")
        sizes = (whole,) if whole == sizes else (whole // sizes,) * sizes
    widths = sub.widths
    if widths is None:
        uneven = [size for size in sizes if size % ranks]
        if uneven:
            raise ValueError(f"a sub-parameter of size {brief(uneven[0])} cannot be split evenly over {ranks} ranks")
        widths = tuple((size // ranks,) * ranks for size in sizes)
    if len(widths) != len(sizes) or any(len(by_rank) != ranks or min(by_rank) < 0 for by_rank in widths):
        raise ValueError(
            f"sub_param_shard_widths is {brief(widths)}, but widths of {count_of(len(sizes), 'sub-parameter')} on "
            f"{ranks} ranks were expected"
        )
    if any(sum(by_rank) != size for by_rank, size in zip(widths, sizes, strict=True)):
        sums = [sum(by_rank) for by_rank in widths]
        raise ValueError(
            f"the widths in sub_param_shard_widths add up to {brief(sums)}, but the sub-parameters have the sizes "
            f"{brief(list(sizes))}"
        )
    shape = list(sub.shape)
    shape[dim] = sum(sizes)
    open_dims = [index for index, size in enumerate(shape) if size < 0]
    known = math.prod(size for size in shape if size >= 0)
    total = sum(part.numel for part in slices)
    if len(open_dims) > 1 or (open_dims and (not known or total % known)):
        raise ValueError(f"the shape {brief(shape)} cannot be completed for the {total} elements of the slices")
    for index in open_dims:
        shape[index] = total // known
    shaped = [
        _viewed(part, (*shape[:dim], sum(by_rank[rank] for by_rank in widths), *shape[dim + 1 :]))
        for rank, part in enumerate(slices)
    ]
    return _interleave(shaped, dim, widths)


def _interleave(slices: Sequence[LazyTensor], dim: int, widths: Sequence[Sequence[int]]) -> LazyTensor:
    """Join slices that each hold a part of several parameters: all parts of the first, then of the second, and so on.

    `widths` are the parts' sizes along `dim`, by parameter and rank. Raises ValueError if they do not fit the slices.
    """
    for rank, part in enumerate(slices):
        if sum(by_rank[rank] for by_rank in widths) != part.shape[dim]:
            sizes = [by_rank[rank] for by_rank in widths]
            raise ValueError(
                f"the sub-parameter sizes {brief(sizes)} on rank {rank} add up to {sum(sizes)}, but its slice has size "
                f"{part.shape[dim]} in dimension {dim}"
            )
    starts = [0] * len(slices)
    parts: list[LazyTensor] = []
    for by_rank in widths:
        for rank, part in enumerate(slices):
            parts.append(Narrow(part, dim, starts[rank], by_rank[rank]))
            starts[rank] += by_rank[rank]
    return Concat(tuple(parts), dim)


def read_map(described: Any, ranks: int) -> PieceMap:
    """Convert the blocks of an affine map to pieces along one dimension.

    A block is a shape with an offset and strides (in elements), in the parameter and in the slice. Raises ValueError
    for a malformed map, UnsupportedError for blocks that are scaled, or not side by side along one dimension.
    """
    try:
        shape = _sizes(described["logical_shape"])
        slices = tuple(_sizes(described["ranks"][rank]["shard_shape"]) for rank in range(ranks))
        blocks = [
            (rank, _sizes(block["shape"]), block["source"], block["dest"], block.get("scale", 1.0))
            for rank in range(ranks)
            for block in described["ranks"][rank]["pieces"]
        ]
        blocks = [block for block in blocks if math.prod(block[1])]
        cut = {dim for _, size, *_ in blocks for dim in range(len(shape)) if size[dim] != shape[dim]}
        cut |= {dim for extents in slices for dim in range(len(shape)) if extents[dim] != shape[dim]}
        if len(cut) > 1 or any(scale != 1.0 for *_, scale in blocks):
            how = f"split along the dimensions {sorted(cut)}" if len(cut) > 1 else "scaled"
            raise _unjoined(f"A parameter of shape {list(shape)} was {how}, which is not supported.")
        dim = min(cut, default=0)
        pieces = []
        for rank, size, source, dest, _ in blocks:
            length = size[dim] if size else 1
            start = _along(shape, size, dim, source)
            pieces.append(Piece(start, length, rank, _along(slices[rank], size, dim, dest)))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"its affine_map is malformed ({type(error).__name__})") from error
    return PieceMap(dim, shape, slices, tuple(pieces))


def _sizes(values: Any) -> Shape:
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in values):
        raise TypeError("not a shape")
    return tuple(values)


def _along(shape: Shape, block: Shape, dim: int, place: Any) -> int:
    """Return the index along `dim` of `shape` at which a block begins.

    Raises UnsupportedError if the block's strides differ from those of `shape`, ValueError for a bad offset.
    """
    offset, strides = int(place[0]), [int(stride) for stride in place[1]]
    expected = contiguous_strides(shape)
    if len(strides) != len(shape) or any(
        size > 1 and stride != want for size, stride, want in zip(block, strides, expected, strict=True)
    ):
        raise _unjoined(
            f"A parameter of shape {list(shape)} has a part that is not contiguous, which is not supported."
        )
    step = expected[dim] if shape else 1
    if offset % step or (not shape and offset):
        wanted = f"a multiple of {step}" if shape else "0"
        raise ValueError(f"a block of shape {block} begins at element {offset}, but {wanted} was expected")
    return offset // step
