"""Compute a lazy tensor's elements by means other than a conversion's: slow, for verification only.

It shares with a conversion the expressions that say where bytes lie, but not the code that carries them out. A
conversion cuts a tensor into moves of bytes and runs kernels over them. Here an expression is asked for an interval or
a box of elements, and asks its inner expression in turn; `arithmetic` evaluates the kernels. Everything happens in
blocks, so memory stays small whatever a tensor's size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptconv.features.pairs.runs import Run
from ckptconv.features.verify.arithmetic import CAST_BLOCK, TILES, InputBox, code_of, converted, joined
from ckptconv.storage.reading import Range, Sources
from ckptconv.tensors.computing import Joined, Tiled
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import (
    Concat,
    Convert,
    Inline,
    LazyTensor,
    Narrow,
    Partitioned,
    Picked,
    Stored,
    Tagged,
    View,
    Zeros,
)
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import contiguous_strides

if TYPE_CHECKING:
    from ckptconv.features.verify.arithmetic import Array

T = TypeVar("T")

# A footprint lists up to this many runs one by one; of more, it gives one range from the first to the last.
_RUNS = 1 << 12
# The largest gap between two elements that is read through, and the most read at once for such elements, in bytes.
_GAP, _MOST = 1 << 14, 1 << 20
# The largest gap between two small tensors that are read together, in bytes, and the files of which bytes are kept.
_NEAR, _FILES = 1 << 12, 4


class _Asking(Generic[T]):
    """Asks an expression for an interval or a box of elements, and its inner expressions for the elements it needs.

    The result is a `T` of the subclass: `_make` computes it from other results, `_read` reads it from a file,
    `_gathered` gathers it from elements that do not lie in C order. `_runs` gives a box as intervals.
    """

    def flat(self, tensor: LazyTensor, start: int, stop: int) -> T:
        """Return elements `start` to `stop` in C order, as a one-dimensional array."""
        if isinstance(tensor, Tagged):
            return self.flat(tensor.tensor, start, stop)
        if start >= stop or isinstance(tensor, (Inline, Zeros)):
            return self._make(_inline, tensor, start, stop)
        if isinstance(tensor, Joined):
            return self._make(joined, tensor, [self.flat(part, start, stop) for part in tensor.parts])
        item = tensor.dtype.itemsize
        if stored := stored_in_order(tensor):
            return self._read(stored.file, stored.offset + start * item, stop - start, stored.dtype)
        if isinstance(tensor, Partitioned):
            pieces = []
            for rank in range(start // tensor.piece, -(-stop // tensor.piece)):
                first, last = (min(max(at - rank * tensor.piece, 0), tensor.piece) for at in (start, stop))
                offset = tensor.bases[rank] + tensor.offset + first * item
                pieces.append(self._read(tensor.files[rank], offset, last - first, tensor.dtype))
            return self._make(_end_to_end, tensor, pieces)
        if isinstance(tensor, View):
            inner = tensor.tensor.dtype.itemsize
            low, high = start * item // inner, -(-stop * item // inner)
            seen = self.flat(tensor.tensor, low, high)
            return self._make(_cut, tensor, seen, start * item - low * inner, stop * item - low * inner)
        if isinstance(tensor, Convert):
            return self._make(converted, tensor, self.flat(tensor.tensor, start, stop))
        return self._make(_end_to_end, tensor, [self.box(tensor, *box) for box in _boxes(tensor.shape, start, stop)])

    def box(self, tensor: LazyTensor, starts: Sequence[int], counts: Sequence[int]) -> T:
        """Return the box of `counts[d]` elements from index `starts[d]` on along each dimension d."""
        if isinstance(tensor, Tagged):
            return self.box(tensor.tensor, starts, counts)
        if isinstance(tensor, Convert):
            return self._make(converted, tensor, self.box(tensor.tensor, starts, counts))
        if isinstance(tensor, Narrow):
            moved = [start + (tensor.start if dim == tensor.dim else 0) for dim, start in enumerate(starts)]
            return self.box(tensor.tensor, moved, counts)
        if isinstance(tensor, Concat):
            pieces = [self.box(*inner) for inner in _parts_in(tensor, starts, counts)]
            return self._make(_side_by_side, tensor, counts, tensor.dim, pieces)
        if isinstance(tensor, Joined):
            return self._make(joined, tensor, [self.box(part, starts, counts) for part in tensor.parts])
        if isinstance(tensor, Tiled):
            return self._tiled(tensor, starts, counts)
        if isinstance(tensor, (Stored, Picked)):
            item = tensor.dtype.itemsize
            at = sum(start * stride for start, stride in zip(starts, tensor.strides, strict=True)) * item
            first = tensor.offset if isinstance(tensor, Stored) else tensor.start * item
            return self._gathered(tensor, first + at, [stride * item for stride in tensor.strides], counts)
        if isinstance(tensor, View) and (inner := _same_box(tensor, starts, counts)) is not None:
            return self._make(_seen, tensor, counts, self.box(tensor.tensor, *inner))
        if not isinstance(tensor, (View, Inline, Zeros, Partitioned)):
            raise TypeError(f"{type(tensor).__name__} is an expression that cannot be evaluated")
        # The others are read in C order, run by run: a run spans the trailing dimensions that the box covers whole.
        runs = [self.flat(tensor, at, at + length) for at, length in self._runs(tensor, starts, counts)]
        return self._make(_laid, tensor, counts, runs)

    def _tiled(self, tensor: Tiled, starts: Sequence[int], counts: Sequence[int]) -> T:
        boxes = list(_inputs(tensor, starts, counts))
        arrays = [self.box(part, *box) for part, box in zip(tensor.parts, boxes, strict=True)]
        return self._make(_tile, tensor, starts, counts, boxes, arrays)

    def _runs(self, tensor: LazyTensor, starts: Sequence[int], counts: Sequence[int]) -> Iterable[tuple[int, int]]:
        return _runs(tensor.shape, starts, counts)

    def _make(self, make: Callable[..., Array], *arguments: Any) -> T:
        raise NotImplementedError

    def _read(self, file: File, offset: int, count: int, dtype: DType) -> T:
        raise NotImplementedError

    def _gathered(self, tensor: Stored | Picked, offset: int, strides: Sequence[int], counts: Sequence[int]) -> T:
        """Return the box of `counts` elements that lie at `strides` (in bytes) from byte `offset` on."""
        raise NotImplementedError


class Evaluator(_Asking["Array"]):
    """Evaluates lazy tensors. Arrays hold an element's bits as an unsigned integer, or as bytes if numpy has none so
    large.

    Small tensors that follow each other in a file are read together, at most `ahead` bytes at a time. `bytes_read`
    counts the bytes read from files.
    """

    def __init__(self, readers: Sources, ahead: int = 0) -> None:
        self._readers, self._ahead = readers, ahead
        # The last bytes read of each file, and where they begin; for few files.
        self._blocks: dict[File, tuple[int, bytes]] = {}
        self.bytes_read = 0
        self._number: tuple[Tiled | None, Any] = (None, None)

    def raw(self, tensor: LazyTensor, start: int, stop: int) -> bytes:
        """Return the bytes of elements `start` to `stop` in C order."""
        if stored := stored_in_order(tensor):
            item = stored.dtype.itemsize
            return self.read_at(stored.file, stored.offset + start * item, (stop - start) * item)
        return self.flat(tensor, start, stop).tobytes()

    def bits(self, tensor: LazyTensor, run: Run) -> bytes:
        """Return the bytes of the elements of a run."""
        return self.raw(tensor, run.start, run.stop) if run.box is None else self.box(tensor, *run.box).tobytes()

    def _make(self, make: Callable[..., Array], *arguments: Any) -> Array:
        return make(*arguments)

    def _read(self, file: File, offset: int, count: int, dtype: DType) -> Array:
        data = self.read_at(file, offset, count * dtype.itemsize)
        array: Array = numpy_module().frombuffer(data, code_of(dtype))
        return array

    def read_at(self, file: File, offset: int, length: int) -> bytes:
        """Return bytes of a file."""
        if length >= self._ahead or file.packed:
            return self._read_past(file, offset, length)
        start, block = self._blocks.get(file) or (offset, b"")
        stop = start + len(block)
        if not start <= offset <= offset + length <= stop:
            # The first is read alone, and twice as much as before with each that follows: there may be no other.
            follows = file in self._blocks and start <= offset <= stop + _NEAR
            size = max(min(2 * len(block), self._ahead, file.size - offset), length) if follows else length
            start, block = offset, self._read_past(file, offset, size)
            self._blocks.pop(file, None)
            self._blocks[file] = start, block
            if len(self._blocks) > _FILES:
                del self._blocks[next(iter(self._blocks))]
        return block[offset - start : offset - start + length]

    def _read_past(self, file: File, offset: int, length: int) -> bytes:
        """Return bytes of a file, read now."""
        self.bytes_read += length
        with self._readers.reading(file) as reader:
            return reader.read_at(offset, length)

    def _tiled(self, tensor: Tiled, starts: Sequence[int], counts: Sequence[int]) -> Array:
        if tensor.shape == (1,) and tensor.parts[0].numel > 1:  # a number that every element of a tensor may need
            if self._number[0] is not tensor:
                self._number = tensor, super()._tiled(tensor, starts, counts)
            result: Array = self._number[1]
            return result
        half = _halved(tensor, counts)
        if half is None:
            return super()._tiled(tensor, starts, counts)
        # An element takes many input elements: compute a box of a few at a time.
        dim, count = half
        after = [start + (count if dim == at else 0) for at, start in enumerate(starts)]
        left, right = ([*counts[:dim], extent, *counts[dim + 1 :]] for extent in (count, counts[dim] - count))
        halves = [self._tiled(tensor, starts, left), self._tiled(tensor, after, right)]
        return _side_by_side(tensor, counts, dim, halves)

    def _gathered(self, tensor: Stored | Picked, offset: int, strides: Sequence[int], counts: Sequence[int]) -> Array:
        result: Array = numpy_module().empty(tuple(counts), code_of(tensor.dtype))
        if result.size:
            self._gather(self._within(tensor), offset, strides, tensor.dtype.itemsize, result)
        return result

    def _within(self, tensor: Stored | Picked) -> Callable[[int, int], bytes]:
        """Return the function that reads bytes, by offset and length, of the file or tensor that holds `tensor`."""
        if isinstance(tensor, Stored):
            return lambda at, length: self.read_at(tensor.file, at, length)
        item = tensor.dtype.itemsize
        return lambda at, length: self.flat(tensor.tensor, at // item, (at + length) // item).tobytes()

    def _gather(
        self, read: Callable[[int, int], bytes], offset: int, strides: Sequence[int], item: int, out: Array
    ) -> None:
        """Fill `out` with elements of `item` bytes that lie at `strides` (in bytes) from byte `offset` on."""
        np = numpy_module()
        dims = sorted((stride, dim) for dim, stride in enumerate(strides) if out.shape[dim] > 1 and stride)
        # Dimensions covered by one read: along them, elements lie at most _GAP bytes apart.
        run, together = item, []
        for stride, dim in dims:
            if stride - run > _GAP:
                break
            run += stride * (out.shape[dim] - 1)
            together.append(dim)
        if run > _MOST:
            dim = together[-1]
            half = out.shape[dim] // 2
            before, after = ((slice(None),) * dim + (cut,) for cut in (slice(half), slice(half, None)))
            self._gather(read, offset, strides, item, out[before])
            self._gather(read, offset + half * strides[dim], strides, item, out[after])
            return
        apart = [dim for _, dim in dims if dim not in together]
        for indices in itertools.product(*(range(out.shape[dim]) for dim in apart)):
            place = dict(zip(apart, indices, strict=True))
            at = offset + sum(index * strides[dim] for dim, index in place.items())
            data = np.frombuffer(read(at, run), out.dtype)
            key = tuple(place.get(dim, slice(None)) for dim in range(out.ndim))
            target = out[key]
            left = [dim for dim in range(out.ndim) if dim not in place]
            # A dimension of one element, or with stride 0, takes no step.
            steps = [strides[dim] if dim in together else 0 for dim in left]
            out[key] = np.lib.stride_tricks.as_strided(data, np.shape(target), steps)


class _Footprint(_Asking[None]):
    """Notes the ranges of files that are read, and evaluates nothing."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def _make(self, make: Callable[..., Array], *arguments: Any) -> None:
        pass

    def _read(self, file: File, offset: int, count: int, dtype: DType) -> None:
        self.ranges.append(Range(file, offset, offset + count * dtype.itemsize))

    def _gathered(self, tensor: Stored | Picked, offset: int, strides: Sequence[int], counts: Sequence[int]) -> None:
        item = tensor.dtype.itemsize
        dims = sorted(zip(strides, counts, strict=True))
        run = item
        # Merge the dimensions of small stride into the run, and more of them while there would be more than _RUNS runs.
        while dims and (dims[0][0] <= run + _GAP or math.prod(count for _, count in dims) > _RUNS):
            run += dims[0][0] * (dims[0][1] - 1)
            del dims[0]
        for indices in itertools.product(*(range(count) for _, count in dims)):
            first = offset + sum(index * stride for index, (stride, _) in zip(indices, dims, strict=True))
            if isinstance(tensor, Stored):
                self._read(tensor.file, first, run // item, tensor.dtype)
            else:
                self.flat(tensor.tensor, first // item, (first + run) // item)

    def _runs(self, tensor: LazyTensor, starts: Sequence[int], counts: Sequence[int]) -> Iterable[tuple[int, int]]:
        runs = list(itertools.islice(super()._runs(tensor, starts, counts), _RUNS + 1))
        if len(runs) <= _RUNS:
            return runs
        (first, _), steps = runs[0], contiguous_strides(tensor.shape)
        return [(first, sum((count - 1) * step for count, step in zip(counts, steps, strict=True)) + 1)]


def footprint(tensor: LazyTensor, start: int, stop: int) -> list[Range]:
    """Return the ranges of files read for elements `start` to `stop` in C order, perhaps with gaps between elements."""
    noted = _Footprint()
    noted.flat(tensor, start, stop)
    return noted.ranges


# ------------------------------------------------------------------------------------------------------- geometry


def stored_in_order(tensor: LazyTensor) -> Stored | None:
    """Return `tensor` without its facts if it is elements stored in C order, else None."""
    if isinstance(tensor, Tagged):
        tensor = tensor.tensor
    return tensor if isinstance(tensor, Stored) and tensor.strides == contiguous_strides(tensor.shape) else None


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield boxes that together hold elements `start` to `stop` in C order, one after the other."""
    if start >= stop:
        return
    if not shape:
        yield [], []
        return
    size = math.prod(shape[1:])
    row, last = start // size, (stop - 1) // size
    if row == last and stop - start < size:
        for starts, counts in _boxes(shape[1:], start - row * size, stop - row * size):
            yield [row, *starts], [1, *counts]
        return
    if start > row * size:
        yield from _boxes(shape, start, (row + 1) * size)
        row += 1
    whole = stop // size
    if row < whole:
        yield [row, *(0 for _ in shape[1:])], [whole - row, *shape[1:]]
    if whole * size < stop:
        yield from _boxes(shape, max(whole * size, start), stop)


def _parts_in(
    tensor: Concat, starts: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[LazyTensor, list[int], list[int]]]:
    """Yield each part that a box of `tensor` touches, with the box's extent in that part."""
    dim, at = tensor.dim, 0
    low, high = starts[dim], starts[dim] + counts[dim]
    for part in tensor.parts:
        extent = part.shape[dim]
        first, last = max(low, at), min(high, at + extent)
        if first < last:
            inner = [*starts[:dim], first - at, *starts[dim + 1 :]]
            yield part, inner, [*counts[:dim], last - first, *counts[dim + 1 :]]
        at += extent


def _inputs(tensor: Tiled, starts: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each part of `tensor` the box that a box of it needs."""
    for part, axes in zip(tensor.parts, tensor.axes, strict=True):
        first, extents = [], []
        for axis, extent in zip(axes, part.shape, strict=True):
            side = tensor.whole[axis.dim] if tensor.whole else 1
            low = starts[axis.dim] + tensor.starts[axis.dim]
            last = low + counts[axis.dim] - 1
            if axis.num:
                low, last = low // side * side, last // side * side + side - 1
                before, after = low * axis.num // axis.den, ((last + 1) * axis.num - 1) // axis.den + 1
                before, after = min(before, extent), min(after, extent)
            else:
                before, after = 0, extent
            first.append(before)
            extents.append(after - before)
        yield first, extents


def _halved(tensor: Tiled, counts: Sequence[int]) -> tuple[int, int] | None:
    """Return the dimension along which a box of a tensor is to be halved, and half of its extent there, if its inputs
    are larger than one read; None if they are not."""
    reduced = math.prod(max(axis.num // axis.den, 1) for axis in tensor.axes[0])
    dim = max(range(len(counts)), key=lambda dim: counts[dim], default=0)
    if reduced * math.prod(counts) * tensor.parts[0].dtype.itemsize <= _MOST or not counts or counts[dim] < 2:
        return None
    return (dim, counts[dim] // 2) if reduced > 1 and not tensor.whole else None


def _chunks(counts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield boxes of at most `CAST_BLOCK` elements that cover one of these sides, as intervals of each side."""
    sides = list(counts)
    for dim in range(len(sides)):
        if math.prod(sides) > CAST_BLOCK:
            sides[dim] = max(CAST_BLOCK // max(math.prod(sides[dim + 1 :]), 1), 1)
    for low in itertools.product(*(range(0, count, side) for count, side in zip(counts, sides, strict=True))):
        yield [(at, min(at + side, count)) for at, side, count in zip(low, sides, counts, strict=True)]


def _runs(shape: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the box as runs of elements in C order: the first element of each, and its length."""
    if not math.prod(counts):
        return
    steps = contiguous_strides(shape)
    whole = len(shape)
    while whole and counts[whole - 1] == shape[whole - 1]:
        whole -= 1
    # The last dimension that the box does not cover whole is still contiguous.
    outer = max(whole - 1, 0)
    length = math.prod(counts[outer:])
    base = sum(start * step for start, step in zip(starts, steps, strict=True))
    for indices in itertools.product(*(range(count) for count in counts[:outer])):
        yield base + sum(index * step for index, step in zip(indices, steps, strict=False)), length


def _same_box(view: View, starts: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Return the box of the viewed tensor that equals this box of `view`; None if it is no box there."""
    shape, inner = view.shape, view.tensor.shape
    ratio = view.tensor.dtype.itemsize // view.dtype.itemsize
    if ratio > 1 and shape == (*inner, ratio) and counts[-1] == ratio:
        return list(starts[:-1]), list(counts[:-1])
    if view.dtype.itemsize != view.tensor.dtype.itemsize:
        return None
    wide = [dim for dim, extent in enumerate(shape) if extent != 1]
    if [shape[dim] for dim in wide] != [extent for extent in inner if extent != 1] or 0 in counts:
        return None
    dims_left = iter(wide)
    dims = [None if extent == 1 else next(dims_left) for extent in inner]
    return [0 if dim is None else starts[dim] for dim in dims], [1 if dim is None else counts[dim] for dim in dims]


# ------------------------------------------------------------------------------------------- arrays made of others


def _inline(tensor: LazyTensor, start: int, stop: int) -> Array:
    """Return elements that are in no file."""
    np = numpy_module()
    if isinstance(tensor, Inline):
        array: Array = np.frombuffer(tensor.data, code_of(tensor.dtype))[start:stop]
        return array
    zeros: Array = np.zeros(max(stop - start, 0), code_of(tensor.dtype))
    return zeros


def _end_to_end(tensor: LazyTensor, parts: Sequence[Array]) -> Array:
    """Return the elements of `parts` one after the other."""
    np = numpy_module()
    flat = [part.reshape(-1) for part in parts]
    return flat[0] if len(flat) == 1 else np.concatenate([np.empty(0, code_of(tensor.dtype)), *flat])


def _laid(tensor: LazyTensor, counts: Sequence[int], runs: Sequence[Array]) -> Array:
    """Return the box of `counts` whose runs in C order these are."""
    return _end_to_end(tensor, runs).reshape(tuple(counts))


def _side_by_side(tensor: LazyTensor, counts: Sequence[int], dim: int, parts: Sequence[Array]) -> Array:
    """Return the box of `counts` that consists of `parts` along `dim`."""
    np = numpy_module()
    if len(parts) == 1:
        return parts[0]
    array: Array = np.concatenate(
        [np.empty((*counts[:dim], 0, *counts[dim + 1 :]), code_of(tensor.dtype)), *parts], dim
    )
    return array


def _cut(tensor: View, inner: Array, start: int, stop: int) -> Array:
    """Return bytes `start` to `stop` of the viewed tensor's as elements of `tensor`."""
    cut = numpy_module().ascontiguousarray(inner).view("u1")[start:stop]
    array: Array = cut.copy().view(code_of(tensor.dtype))
    return array


def _seen(tensor: View, counts: Sequence[int], inner: Array) -> Array:
    """Return a box of the viewed tensor as one of `tensor`."""
    array: Array = numpy_module().ascontiguousarray(inner).view(code_of(tensor.dtype))
    return array.reshape(tuple(counts))


def _tile(
    tensor: Tiled,
    starts: Sequence[int],
    counts: Sequence[int],
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]],
    arrays: Sequence[Array],
) -> Array:
    """Return a box of a tile, made of `boxes` of its parts."""
    np = numpy_module()
    parts = [
        InputBox(part.dtype.name, array, tuple(axes), tuple(first))
        for part, axes, (first, _), array in zip(tensor.parts, tensor.axes, boxes, arrays, strict=True)
    ]
    at = [start + more for start, more in zip(starts, tensor.starts, strict=True)]
    tile: Array = np.empty(tuple(counts), code_of(tensor.dtype))
    # Some rows at a time: there are several numbers of 8 bytes for each element.
    for rows in _chunks(counts):
        indices = [first + np.arange(low, high) for first, (low, high) in zip(at, rows, strict=True)]
        tile[tuple(slice(*bounds) for bounds in rows)] = TILES[type(tensor.kernel)](tensor.kernel, parts, indices)
    return tile
