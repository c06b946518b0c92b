"""Slices of lazy tensors, as lazy tensors that need only some bytes of the files. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Narrow, Partitioned, Picked, Stored, Tagged, View, Zeros
from ckptconv.tensors.strides import contiguous_strides

if TYPE_CHECKING:
    from ckptconv.tensors.computing import Tiled


class Span(NamedTuple):
    """The indices of one dimension: `length` of them from `start`, each `step` (at least 1) after the one before."""

    start: int
    step: int
    length: int


class Steps(NamedTuple):
    """The places of the indices of one dimension of a result in a tensor: `length` of them, each `step` further along
    dimension `dim` than the one before."""

    length: int
    dim: int
    step: int


def sliced(tensor: LazyTensor, spans: Sequence[Span]) -> LazyTensor:
    """Return the elements of `tensor` at `spans`, one for each dimension."""
    if all(span == (0, 1, extent) for span, extent in zip(spans, tensor.shape, strict=True)):
        return tensor
    starts = [span.start for span in spans]
    return strided(tensor, starts, [Steps(span.length, dim, span.step) for dim, span in enumerate(spans)])


def strided(tensor: LazyTensor, starts: Sequence[int], axes: Sequence[Steps]) -> LazyTensor:
    """Return the elements of `tensor` at index `starts[d]` and on along each dimension d, by the steps of `axes`.

    The result has one dimension for each of `axes`, of which several may go along one dimension of `tensor`: all must
    stay inside it, and steps are at least 1. An expression of stored elements becomes one of stored elements again.
    Only an expression that cuts a tensor without regard to its shape, as partitions of ZeRO-3 do, becomes `Picked`.
    """
    shape = tuple(axis.length for axis in axes)
    if isinstance(tensor, Zeros) or not math.prod(shape):
        return Zeros(tensor.dtype, shape)
    stored = as_stored(tensor) or _as_piece(tensor, starts, axes)
    if stored is not None:
        offset = stored.offset + _flat(starts, stored.strides) * stored.dtype.itemsize
        return stored.replaced(offset=offset, shape=shape, strides=_strides(axes, stored.strides))
    if isinstance(tensor, Tagged):
        return strided(tensor.tensor, starts, axes)
    if isinstance(tensor, Convert):
        return tensor.replaced(tensor=strided(tensor.tensor, starts, axes))
    from ckptconv.tensors.computing import Joined, Tiled  # few are

    if isinstance(tensor, Joined):
        return tensor.replaced(parts=tuple(strided(part, starts, axes) for part in tensor.parts))
    if isinstance(tensor, Tiled) and (box := _box(tensor, starts, axes)) is not None:
        return viewed(box, shape)
    if isinstance(tensor, Narrow):
        return strided(tensor.tensor, _moved(starts, tensor.dim, tensor.start), axes)
    if isinstance(tensor, Concat):
        return _of_parts(tensor, starts, axes)
    if isinstance(tensor, View) and tensor.shape == tensor.tensor.shape:
        return View(strided(tensor.tensor, starts, axes), tensor.dtype, shape)
    within = contiguous_strides(tensor.shape)
    return Picked(tensor, _flat(starts, within), shape, _strides(axes, within))


def _box(tensor: Tiled, starts: Sequence[int], axes: Sequence[Steps]) -> Tiled | None:
    """Return the elements as in `strided` with all dimensions of `tensor`, if they are a box of it in its order."""
    along = [axis for axis in axes if axis.length > 1]
    dims = [axis.dim for axis in along]
    if dims != sorted(set(dims)) or any(axis.step != 1 for axis in along):
        return None
    lengths = {axis.dim: axis.length for axis in along}
    first = tuple(map(sum, zip(tensor.starts, starts, strict=True)))
    return tensor.replaced(shape=tuple(lengths.get(dim, 1) for dim in range(len(starts))), starts=first)


def _flat(starts: Sequence[int], strides: Sequence[int]) -> int:
    return sum(start * stride for start, stride in zip(starts, strides, strict=True))


def _strides(axes: Sequence[Steps], strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis.step * strides[axis.dim] for axis in axes)


def _moved(starts: Sequence[int], dim: int, distance: int) -> list[int]:
    return [start + distance if at == dim else start for at, start in enumerate(starts)]


def _of_parts(tensor: Concat, starts: Sequence[int], axes: Sequence[Steps]) -> LazyTensor:
    """Return elements of a joined tensor, as in `strided`: those of each part that has any of them, joined."""
    dim = tensor.dim
    ends = list(itertools.accumulate(part.shape[dim] for part in tensor.parts))
    along = [number for number, axis in enumerate(axes) if axis.dim == dim and axis.length > 1]
    first = bisect.bisect_right(ends, starts[dim])
    last = starts[dim] + sum((axes[number].length - 1) * axes[number].step for number in along)
    if last < ends[first]:
        before = ends[first] - tensor.parts[first].shape[dim]
        return strided(tensor.parts[first], _moved(starts, dim, -before), axes)
    # Divide the axis of the largest step where one part ends; an index that is in two parts is divided by itself.
    cut = max(along, key=lambda number: axes[number].step)
    length, _, step = axes[cut]
    inner = sum((axes[number].length - 1) * axes[number].step for number in along if number != cut)
    chosen: list[LazyTensor] = []
    done = 0
    while done < length:
        at = starts[dim] + done * step
        end = ends[bisect.bisect_right(ends, at)]
        count = min(max((end - 1 - inner - at) // step + 1, 1), length - done)
        some = [*axes[:cut], axes[cut]._replace(length=count), *axes[cut + 1 :]]
        chosen.append(_of_parts(tensor, _moved(starts, dim, done * step), some))
        done += count
    return chosen[0] if len(chosen) == 1 else Concat(tuple(chosen), cut)


def as_stored(tensor: LazyTensor) -> Stored | None:
    """Return `tensor` as elements stored in one file; None if it is anything else."""
    if isinstance(tensor, Tagged):
        return as_stored(tensor.tensor)
    if isinstance(tensor, View):
        inner = as_stored(tensor.tensor)
        if inner is None:
            return None
        if tensor.shape == (*inner.shape, 2) and inner.dtype.kind == "c":
            strides = (*(2 * stride for stride in inner.strides), 1)
        elif inner.contiguous:
            strides = contiguous_strides(tensor.shape)
        else:
            same_items = tensor.dtype.itemsize == inner.dtype.itemsize
            reshaped = reshaped_strides(inner.shape, inner.strides, tensor.shape) if same_items else None
            if reshaped is None:
                return None
            strides = reshaped
        return Stored(inner.file, inner.offset, tensor.dtype, tensor.shape, strides)
    if isinstance(tensor, Partitioned):
        return _as_piece(tensor, [0] * len(tensor.shape), [Steps(n, dim, 1) for dim, n in enumerate(tensor.shape)])
    return tensor if isinstance(tensor, Stored) else None


def reshaped_strides(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of the same elements, in the same order, in the shape `wanted`; None if there are none."""
    runs: list[list[int]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if runs and runs[-1][1] == extent * stride:
            runs[-1] = [runs[-1][0] * extent, stride]
        else:
            runs.append([extent, stride])
    result: list[int] = []
    left, step = 1, 1
    for extent in reversed(wanted):
        if extent != 1 and left == 1:
            if not runs:
                return None
            left, step = runs.pop()
        if left % max(extent, 1) or not extent:
            return None
        result.append(step)
        left, step = left // extent, step * extent
    return tuple(reversed(result)) if left == 1 and not runs else None


def _as_piece(tensor: LazyTensor, starts: Sequence[int], axes: Sequence[Steps]) -> Stored | None:
    """Return all of `tensor` as if one rank's piece of it went on, if that piece has all elements of `strided`; else
    None."""
    if not isinstance(tensor, Partitioned) or not tensor.numel:
        return None
    strides = contiguous_strides(tensor.shape)
    first = _flat(starts, strides)
    last = first + sum((axis.length - 1) * axis.step * strides[axis.dim] for axis in axes)
    rank = first // tensor.piece
    if last // tensor.piece != rank:
        return None
    before = tensor.offset - rank * tensor.piece * tensor.dtype.itemsize
    return Stored(tensor.files[rank], tensor.bases[rank] + before, tensor.dtype, tensor.shape, strides)


def viewed(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """Return the elements of `tensor` in another shape."""
    if tensor.shape == shape:
        return tensor
    inner = tensor.tensor if isinstance(tensor, View) and tensor.dtype == tensor.tensor.dtype else tensor
    view = View(inner, tensor.dtype, shape)
    return as_stored(view) or view


def opened(tensor: LazyTensor, shape: tuple[int, ...] | None = None) -> LazyTensor:
    """Return the same bytes as an expression that `strided` takes apart to stored elements, if there is one.

    It has views of the parts of a joined tensor, instead of a view of the whole. It has the shape `shape`, or if that
    is None the shape of the tensor inside the views.
    """
    if isinstance(tensor, Tagged) or (isinstance(tensor, View) and tensor.dtype == tensor.tensor.dtype):
        stored = as_stored(tensor) if shape is None else None
        return stored or opened(tensor.tensor, shape)
    if isinstance(tensor, Convert):
        return tensor.replaced(tensor=opened(tensor.tensor, shape))
    if isinstance(tensor, Concat) and tensor.numel:
        before, extent = math.prod(tensor.shape[: tensor.dim]), tensor.shape[tensor.dim]
        wanted = tensor.shape if shape is None else shape
        for dim, length in enumerate(wanted):
            if math.prod(wanted[:dim]) == before and not length % extent:
                lengths = (part.shape[tensor.dim] * (length // extent) for part in tensor.parts)
                parts = zip(tensor.parts, lengths, strict=True)
                return Concat(tuple(opened(part, (*wanted[:dim], n, *wanted[dim + 1 :])) for part, n in parts), dim)
    return tensor if shape is None else viewed(tensor, shape)


def extent(stored: Stored) -> int:
    """Return the number of bytes from the first element of `stored` to the end of its last; 0 if it has none."""
    if not stored.numel:
        return 0
    if stored.contiguous:  # most are
        return stored.nbytes
    steps = ((count - 1) * stride for count, stride in zip(stored.shape, stored.strides, strict=True))
    return (sum(steps) + 1) * stored.dtype.itemsize
