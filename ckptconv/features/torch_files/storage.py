"""Reassembles the memory that several tensors were views of from these views. Pure."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.lazy import Convert, LazyTensor, Narrow, Stored, View, untagged
from ckptconv.tensors.moves import BLOCK, File, Move, Order, Runs
from ckptconv.tensors.strides import contiguous_strides, is_contiguous

_BYTE = DTYPES["uint8"]
# If views interleave, this many bytes of the storage are assembled at a time.
_STRETCH = 1 << 16
# Strides of bytes one after the other.
_STEP = (1,)


class Placed(NamedTuple):
    """A view: its elements in C order, and its place in the storage (offset and strides in elements)."""

    tensor: LazyTensor
    offset: int
    strides: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The first byte of the storage that the view covers, and the byte after the last."""
        item = self.tensor.dtype.itemsize
        if not self.tensor.numel:
            return self.offset * item, self.offset * item
        last = sum((extent - 1) * stride for extent, stride in zip(self.tensor.shape, self.strides, strict=True))
        return self.offset * item, (self.offset + last + 1) * item


def storage_of(views: Sequence[Placed], nbytes: int) -> LazyTensor:
    """Return the `nbytes` bytes of a storage that contains `views`; bytes in no view are zero.

    Where views overlap, the largest one wins. Raises UnsupportedError for a transposed view that cannot be permuted
    into the order of the storage.
    """
    first = views[0]
    if len(views) == 1 and not first.offset and first.tensor.nbytes == nbytes:
        if is_contiguous(first.tensor.shape, first.strides):
            return _bytes(first.tensor)
        only = _prepared(first)
        if not only.dims and only.low == 0 and only.run == nbytes:
            return only.flat
    ranked = sorted(views, key=lambda view: -view.tensor.nbytes)
    return _Assembled(nbytes, tuple(_prepared(view) for view in ranked if view.tensor.numel))


def overlaps(views: Sequence[Placed]) -> Iterator[tuple[LazyTensor, LazyTensor]]:
    """Yield pairs of tensors that are all equal if, and only if, views agree wherever they overlap."""
    for placed in views:
        yield from _repeats(placed)
    ranked = [_prepared(view) for view in sorted(views, key=lambda view: -view.tensor.nbytes) if view.tensor.numel]
    # The same elements under two names agree by definition.
    ranked = list({(view.flat, view.low, view.dims): view for view in ranked}.values())
    if _are_apart(ranked):
        return
    whole = _Assembled(max(view.high for view in ranked), tuple(ranked))
    for view in ranked:
        yield view.flat, _Shown(whole, view)


def _repeats(view: Placed) -> Iterator[tuple[LazyTensor, LazyTensor]]:
    """Yield pairs that are equal if the elements that a view repeats, by strides of 0, are equal."""
    tensor = untagged(view.tensor)
    for dim, (extent, stride) in enumerate(zip(tensor.shape, view.strides, strict=True)):
        if extent > 1 and not stride and tensor.numel:
            yield Narrow(tensor, dim, 0, extent - 1), Narrow(tensor, dim, 1, extent - 1)


def _are_apart(views: Sequence[_Prepared]) -> bool:
    """Return whether no byte is in two views, or twice in one, as far as a cheap test shows."""
    if not all(view.is_plain for view in views):
        return False
    distances = {view.dims[0][1] if len(view.dims) == 1 else 0 for view in views}
    row = distances.pop() if len(distances) == 1 else 0
    # Blocks of columns of one matrix do not overlap if they do not overlap within a row.
    places = [(view.low % row, view.low % row + view.run) if row else (view.low, view.high) for view in views]
    places.sort()
    return all(place[1] <= following[0] for place, following in itertools.pairwise([*places, (row or math.inf, 0)]))


def strides_of(tensor: LazyTensor, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the recorded strides; if there are none, those of a tensor in C order."""
    return strides if len(strides) == len(tensor.shape) else contiguous_strides(tensor.shape)


# --------------------------------------------------------------------------------------------------- views as runs


class _Prepared(NamedTuple):
    """A view as dense runs of `run` bytes, one for each index into `dims`.

    `dims` are pairs (extent, distance in bytes), by descending distance. The first run begins at byte `low` of the
    storage; the view ends at byte `high`. `flat` holds the bytes of all runs, one after the other.
    """

    flat: LazyTensor
    low: int
    high: int
    run: int
    dims: tuple[tuple[int, int], ...]

    @property
    def is_plain(self) -> bool:
        """Whether the view covers no byte twice, as overlapping sliding windows do."""
        reach = self.run
        for extent, distance in reversed(self.dims):
            if distance < reach:
                return False
            reach += (extent - 1) * distance
        return True

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the runs that overlap bytes `start` to `stop` of the storage: their offsets there and in `flat`."""
        reaches = [self.run]
        for extent, distance in reversed(self.dims):
            reaches.append(reaches[-1] + (extent - 1) * distance)
        reaches.reverse()

        def walk(level: int, base: int, index: int) -> Iterator[tuple[int, int]]:
            if level == len(self.dims):
                yield base, index * self.run
                return
            extent, distance = self.dims[level]
            first = max((start - base - reaches[level + 1]) // distance + 1, 0)
            last = min(-((base - stop) // distance), extent)
            for at in range(first, last):
                yield from walk(level + 1, base + at * distance, index * extent + at)

        return walk(0, self.low, 0)


def _prepared(view: Placed) -> _Prepared:
    tensor, item = untagged(view.tensor), view.tensor.dtype.itemsize
    low, high = view.span
    # In memory order, a transposed view is as dense as any other.
    dims = sorted(range(len(tensor.shape)), key=lambda dim: (-view.strides[dim], dim))
    dims = [dim for dim in dims if tensor.shape[dim] > 1]
    if any(view.strides[dim] == 0 for dim in dims):
        # The storage holds a repeated element once.
        for dim in range(len(tensor.shape)):
            if tensor.shape[dim] > 1 and view.strides[dim] == 0:
                tensor = Narrow(tensor, dim, 0, 1)
        dims = [dim for dim in dims if view.strides[dim]]
    shape = tuple(tensor.shape[dim] for dim in dims)
    strides = tuple(view.strides[dim] for dim in dims)
    if dims != sorted(dims):
        tensor = _permuted(tensor, dims)
    inner = len(dims)
    run = 1
    while inner and strides[inner - 1] == run:
        inner -= 1
        run *= shape[inner]
    apart = tuple((extent, stride * item) for extent, stride in zip(shape[:inner], strides[:inner], strict=True))
    return _Prepared(_bytes(tensor), low, high, run * item, apart)


def _bytes(tensor: LazyTensor) -> LazyTensor:
    tensor = untagged(tensor)
    shape = _row(tensor.nbytes)
    if isinstance(tensor, Stored) and tensor.contiguous:
        return Stored(tensor.file, tensor.offset, _BYTE, shape, _STEP)
    return View(tensor, _BYTE, shape)


# There are many tensors, but few sizes: the planning of files asks whether two tensors share a shape.
@functools.lru_cache(maxsize=4096)
def _row(nbytes: int) -> tuple[int]:
    return (nbytes,)


def _permuted(tensor: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    """Return `tensor` with its dimensions in the order `dims`. Dimensions that `dims` omits have one element."""
    if isinstance(tensor, Convert):
        return Convert(_permuted(tensor.tensor, dims), tensor.kernel, tensor.dtype)
    if isinstance(tensor, Narrow):
        return _permuted(_narrowed(tensor.tensor, tensor), dims)
    if isinstance(tensor, Stored):
        shape, strides = (tuple(numbers[dim] for dim in dims) for numbers in (tensor.shape, tensor.strides))
        return Stored(tensor.file, tensor.offset, tensor.dtype, shape, strides)
    raise _cannot_permute()


def _narrowed(tensor: LazyTensor, cut: Narrow) -> LazyTensor:
    """Apply `cut` to `tensor`, by changing the view of the stored elements."""
    if isinstance(tensor, Convert):
        return Convert(_narrowed(tensor.tensor, cut), tensor.kernel, tensor.dtype)
    if isinstance(tensor, Narrow):
        return _narrowed(_narrowed(tensor.tensor, tensor), cut)
    if isinstance(tensor, Stored):
        offset = tensor.offset + cut.start * tensor.strides[cut.dim] * tensor.dtype.itemsize
        return Stored(tensor.file, offset, tensor.dtype, cut.shape, tensor.strides)
    raise _cannot_permute()


def _cannot_permute() -> UnsupportedError:
    return UnsupportedError("A transposed tensor that shares its storage cannot be restored.")


# --------------------------------------------------------------------------------------------------- put together


class _Assembled(LazyTensor):
    """`size` bytes that contain views. Where views overlap, the first one wins; bytes in no view are zero."""

    __slots__ = ("lows", "order", "reach", "size", "views")
    fields = ("size", "views")

    def __init__(self, size: int, views: tuple[_Prepared, ...]) -> None:
        self.size = size
        self.views = views
        # The numbers of the views by where they begin, those beginnings, and the furthest end up to each.
        self.order = tuple(sorted(range(len(views)), key=lambda number: views[number].low))
        self.lows = tuple(views[number].low for number in self.order)
        self.reach = tuple(itertools.accumulate((views[number].high for number in self.order), max))

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return _BYTE

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.size,)

    def inputs(self) -> tuple[File, ...]:
        return tuple(itertools.chain.from_iterable(view.flat.inputs() for view in self.views))

    def origin(self) -> tuple[str, int]:
        return self.views[0].flat.origin() if self.views else ("", 0)

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        while start < stop:
            views = self._touching(start, start + 1)
            after = bisect.bisect_right(self.lows, start)
            end = min(stop, self.lows[after]) if after < len(self.lows) else stop
            if not views:
                yield from _zeros(start, end, limit)
            elif len(views) == 1 and not views[0].dims:
                view = views[0]
                end = min(end, view.high)
                yield from _shifted(view.flat, start - view.low, end - view.low, view.low, limit)
            else:
                end = min(start + min(_STRETCH, limit), stop)
                yield from self._stretch(self._touching(start, end), start, end, limit)
            start = end

    def _touching(self, start: int, stop: int) -> list[_Prepared]:
        """Return the views that may overlap an interval, in order of precedence."""
        first = bisect.bisect_right(self.reach, start)
        last = bisect.bisect_left(self.lows, stop)
        numbers = sorted(self.order[first:last])
        return [self.views[number] for number in numbers if self.views[number].high > start]

    @staticmethod
    def _stretch(views: Sequence[_Prepared], start: int, stop: int, limit: int) -> Iterator[Move]:
        covered: list[tuple[int, int]] = []
        for view in views:
            for begin, source in view.runs(start, stop):
                low, high = max(begin, start), min(begin + view.run, stop)
                for piece in _uncovered(covered, low, high):
                    bisect.insort(covered, piece)
                    yield from _shifted(
                        view.flat, source + piece[0] - begin, source + piece[1] - begin, begin - source, limit
                    )
        for low, high in _uncovered(covered, start, stop):
            yield from _zeros(low, high, limit)


class _Shown(LazyTensor):
    """The bytes that `view` covers in `whole`, run after run."""

    __slots__ = ("view", "whole")

    def __init__(self, whole: _Assembled, view: _Prepared) -> None:
        self.whole = whole
        self.view = view

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return _BYTE

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.view.flat.shape

    def inputs(self) -> tuple[File, ...]:
        return self.whole.inputs()

    def origin(self) -> tuple[str, int]:
        return self.whole.origin()

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        run = self.view.run
        while start < stop:
            index, within = divmod(start, run)
            end = min(start + run - within, stop)
            base = self.view.low
            for extent, distance in reversed(self.view.dims):
                index, at = divmod(index, extent)
                base += at * distance
            yield from _shifted(self.whole, base + within, base + within + end - start, start - base - within, limit)
            start = end


def _shifted(tensor: LazyTensor, start: int, stop: int, distance: int, limit: int) -> Iterator[Move]:
    """Yield the moves of an interval of `tensor`, with their targets shifted by `distance` bytes."""
    for move in tensor.moves(start, stop, "output", limit):
        yield move._replace(target=move.target.shifted(distance))


def _zeros(start: int, stop: int, limit: int) -> Iterator[Move]:
    for at in range(start, stop, limit):
        length = min(limit, stop - at)
        yield Move(Runs(at, length), None, bytes(length))


def _uncovered(covered: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of an interval that are in none of `covered`, which is sorted and without overlaps."""
    index = max(bisect.bisect_right(covered, (start, math.inf)) - 1, 0)
    gaps = []
    while index < len(covered) and covered[index][0] < stop:
        low, high = covered[index]
        if start < low:
            gaps.append((start, low))
        start = max(start, high)
        index += 1
    if start < stop:
        gaps.append((start, stop))
    return gaps
