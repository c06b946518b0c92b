"""Compute a lazy tensor's elements by means other than a conversion's: slow, for verification only.

It shares with a conversion the expressions that say where bytes lie, but not the code that carries them out. A
conversion cuts a tensor into moves of bytes and runs kernels over them. Here an expression is asked for an interval or
a box of elements, and asks its inner expression in turn. Casts go through exact float64 numbers, where a conversion
shifts bits. Everything happens in blocks, so memory stays small whatever a tensor's size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.storage.files import Reader
from ckptconv.storage.prefetch import Range
from ckptconv.tensors.dtypes import DTYPES, DType, itemsize_of_components
from ckptconv.tensors.geometry import contiguous_strides
from ckptconv.tensors.lazy import (
    Axis,
    Concat,
    Convert,
    Inline,
    Joined,
    LazyTensor,
    Narrow,
    Partitioned,
    Picked,
    Stored,
    Tagged,
    Tiled,
    View,
    Zeros,
)
from ckptconv.tensors.moves import (
    Bits,
    Cast,
    Conjugate,
    Dequantize,
    File,
    LowRank,
    Magnitude,
    Negate,
    Overlay,
    Quantize,
    Rescale,
    Swap,
    WeightedSum,
    Xor,
)

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Bytes compared at a time, of local and of remote files; then elements cast at a time: numpy holds several float64
# numbers for each.
BLOCK, FAR_BLOCK = 1 << 19, 1 << 22
CAST_BLOCK = 1 << 15
# A footprint lists up to this many runs one by one; of more, it gives one range from the first to the last.
_RUNS = 1 << 12
# The largest gap between two elements that is read through, and the most read at once for such elements, in bytes.
_GAP, _MOST = 1 << 14, 1 << 20


def _numpy() -> Any:
    import numpy

    return numpy


class Sources(Protocol):
    """Opens readers of files."""

    def reading(self, file: File) -> contextlib.AbstractContextManager[Reader]: ...


class Evaluator:
    """Evaluates lazy tensors. Arrays hold an element's bits as an unsigned integer, or as bytes if numpy has none so
    large.

    `bytes_read` counts the bytes read from files.
    """

    def __init__(self, readers: Sources) -> None:
        self._readers = readers
        self.bytes_read = 0

    def flat(self, tensor: LazyTensor, start: int, stop: int) -> Array:
        """Return elements `start` to `stop` in C order, as a one-dimensional array."""
        np = _numpy()
        if isinstance(tensor, Tagged):
            return self.flat(tensor.tensor, start, stop)
        if start >= stop:
            nothing: Array = np.empty(0, _code(tensor.dtype))
            return nothing
        if isinstance(tensor, Inline):
            array: Array = np.frombuffer(tensor.data, _code(tensor.dtype))[start:stop]
            return array
        if isinstance(tensor, Zeros):
            zeros: Array = np.zeros(stop - start, _code(tensor.dtype))
            return zeros
        if isinstance(tensor, Joined):
            return joined(tensor, [self.flat(part, start, stop) for part in tensor.parts])
        if isinstance(tensor, Stored) and tensor.strides == contiguous_strides(tensor.shape):
            return self._read(tensor.file, tensor.offset + start * tensor.dtype.itemsize, stop - start, tensor.dtype)
        if isinstance(tensor, Partitioned):
            return self._partitioned(tensor, start, stop)
        if isinstance(tensor, View):
            return self._viewed(tensor, start, stop)
        if isinstance(tensor, Convert):
            return converted(tensor, self.flat(tensor.tensor, start, stop))
        parts = [self.box(tensor, *box).reshape(-1) for box in _boxes(tensor.shape, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, _code(tensor.dtype)), *parts])

    def raw(self, tensor: LazyTensor, start: int, stop: int) -> bytes:
        """Return the bytes of elements `start` to `stop` in C order."""
        if isinstance(tensor, Tagged):
            tensor = tensor.tensor
        if isinstance(tensor, Stored) and tensor.strides == contiguous_strides(tensor.shape):
            item = tensor.dtype.itemsize
            return self._bytes(tensor.file, tensor.offset + start * item, (stop - start) * item)
        return self.flat(tensor, start, stop).tobytes()

    def box(self, tensor: LazyTensor, starts: Sequence[int], counts: Sequence[int]) -> Array:
        """Return the box of `counts[d]` elements from index `starts[d]` on along each dimension d."""
        np = _numpy()
        result: Array
        if isinstance(tensor, Tagged):
            return self.box(tensor.tensor, starts, counts)
        if isinstance(tensor, Convert):
            inner = self.box(tensor.tensor, starts, counts)
            return converted(tensor, inner.reshape(-1)).reshape(inner.shape)
        if isinstance(tensor, Narrow):
            moved = [start + (tensor.start if dim == tensor.dim else 0) for dim, start in enumerate(starts)]
            return self.box(tensor.tensor, moved, counts)
        if isinstance(tensor, Concat):
            return self._concatenated(tensor, starts, counts)
        if isinstance(tensor, Joined):
            return joined(tensor, [self.box(part, starts, counts) for part in tensor.parts])
        if isinstance(tensor, Tiled):
            return self._tiled(tensor, starts, counts)
        if isinstance(tensor, (Stored, Picked)):
            result = np.empty(tuple(counts), _code(tensor.dtype))
            if result.size:
                item = tensor.dtype.itemsize
                at = sum(start * stride for start, stride in zip(starts, tensor.strides, strict=True)) * item
                first = tensor.offset if isinstance(tensor, Stored) else tensor.start * item
                self._gather(self._within(tensor), first + at, [s * item for s in tensor.strides], item, result)
            return result
        if isinstance(tensor, View):
            inner_box = _same_box(tensor, starts, counts)
            if inner_box is not None:
                result = np.ascontiguousarray(self.box(tensor.tensor, *inner_box)).view(_code(tensor.dtype))
                return result.reshape(tuple(counts))
        if not isinstance(tensor, (View, Inline, Zeros, Partitioned)):
            raise TypeError(f"{type(tensor).__name__} is an expression that cannot be evaluated")
        # The others are read in C order, run by run: a run spans the trailing dimensions that the box covers whole.
        runs = [self.flat(tensor, at, at + length) for at, length in _runs(tensor.shape, starts, counts)]
        result = np.concatenate([np.empty(0, _code(tensor.dtype)), *runs])
        return result.reshape(tuple(counts))

    def _read(self, file: File, offset: int, count: int, dtype: DType) -> Array:
        data = self._bytes(file, offset, count * dtype.itemsize)
        array: Array = _numpy().frombuffer(data, _code(dtype))
        return array

    def _bytes(self, file: File, offset: int, length: int) -> bytes:
        self.bytes_read += length
        with self._readers.reading(file) as reader:
            return reader.read_at(offset, length)

    def _partitioned(self, tensor: Partitioned, start: int, stop: int) -> Array:
        item = tensor.dtype.itemsize
        pieces = []
        for rank in range(start // tensor.piece, -(-stop // tensor.piece)) if start < stop else ():
            first = max(start, rank * tensor.piece) - rank * tensor.piece
            last = min(stop, (rank + 1) * tensor.piece) - rank * tensor.piece
            offset = tensor.bases[rank] + tensor.offset + first * item
            pieces.append(self._read(tensor.files[rank], offset, last - first, tensor.dtype))
        np = _numpy()
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, _code(tensor.dtype)), *pieces])

    def _viewed(self, tensor: View, start: int, stop: int) -> Array:
        outer, inner = tensor.dtype.itemsize, tensor.tensor.dtype.itemsize
        low, high = start * outer, stop * outer
        first = low // inner
        data = self.flat(tensor.tensor, first, -(-high // inner))
        cut = _numpy().ascontiguousarray(data).view("u1")[low - first * inner : high - first * inner]
        array: Array = cut.copy().view(_code(tensor.dtype))
        return array

    def _concatenated(self, tensor: Concat, starts: Sequence[int], counts: Sequence[int]) -> Array:
        np, dim = _numpy(), tensor.dim
        found: list[Array] = [np.empty((*counts[:dim], 0, *counts[dim + 1 :]), _code(tensor.dtype))]
        found.extend(self.box(*inner) for inner in _parts_in(tensor, starts, counts))
        array: Array = found[1] if len(found) == 2 else np.concatenate(found, axis=dim)
        return array

    def _within(self, tensor: Stored | Picked) -> Callable[[int, int], bytes]:
        """Return the function that reads bytes, by offset and length, of what the elements of `tensor` are in."""
        if isinstance(tensor, Stored):
            return lambda at, length: self._bytes(tensor.file, at, length)
        item = tensor.dtype.itemsize
        return lambda at, length: self.flat(tensor.tensor, at // item, (at + length) // item).tobytes()

    def _tiled(self, tensor: Tiled, starts: Sequence[int], counts: Sequence[int]) -> Array:
        np = _numpy()
        half = _halved(tensor, counts)
        if half is not None:
            # An element is made of many: a box of a few of them at a time.
            dim, count = half
            after = [start + (count if dim == at else 0) for at, start in enumerate(starts)]
            left, right = ([*counts[:dim], each, *counts[dim + 1 :]] for each in (count, counts[dim] - count))
            both: Array = np.concatenate([self._tiled(tensor, starts, left), self._tiled(tensor, after, right)], dim)
            return both
        parts = []
        for part, axes, (first, extents) in zip(
            tensor.parts, tensor.axes, _inputs(tensor, starts, counts), strict=True
        ):
            array = self.box(part, first, extents)
            parts.append(_Given(part.dtype.name, array, tuple(axes), tuple(first)))
        at = [start + more for start, more in zip(starts, tensor.starts, strict=True)]
        made: Array = np.empty(tuple(counts), _code(tensor.dtype))
        # Some rows at a time: there are several numbers of 8 bytes for each element.
        for rows in _chunks(counts):
            indices = [first + np.arange(low, high) for first, (low, high) in zip(at, rows, strict=True)]
            made[tuple(slice(*each) for each in rows)] = _TILES[type(tensor.kernel)](tensor.kernel, parts, indices)
        return made

    def _gather(
        self, read: Callable[[int, int], bytes], offset: int, strides: Sequence[int], item: int, out: Array
    ) -> None:
        """Fill `out` with elements of `item` bytes that lie at `strides` (in bytes) from byte `offset` on."""
        np = _numpy()
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


def footprint(tensor: LazyTensor, start: int, stop: int) -> Iterator[Range]:
    """Yield the ranges of files read for elements `start` to `stop` in C order, perhaps with gaps between elements."""
    if start >= stop or isinstance(tensor, (Inline, Zeros)):
        return
    if isinstance(tensor, (Tagged, Convert)):
        yield from footprint(tensor.tensor, start, stop)
    elif isinstance(tensor, Joined):
        for part in tensor.parts:
            yield from footprint(part, start, stop)
    elif isinstance(tensor, View):
        outer, inner = tensor.dtype.itemsize, tensor.tensor.dtype.itemsize
        yield from footprint(tensor.tensor, start * outer // inner, -(-stop * outer // inner))
    elif isinstance(tensor, Partitioned):
        item = tensor.dtype.itemsize
        for rank in range(start // tensor.piece, -(-stop // tensor.piece)):
            base = tensor.bases[rank] + tensor.offset - rank * tensor.piece * item
            first, last = max(start, rank * tensor.piece), min(stop, (rank + 1) * tensor.piece)
            yield Range(tensor.files[rank], base + first * item, base + last * item)
    else:
        for box in _boxes(tensor.shape, start, stop):
            yield from _footprint_of_box(tensor, *box)


def _footprint_of_box(tensor: LazyTensor, starts: Sequence[int], counts: Sequence[int]) -> Iterator[Range]:
    if isinstance(tensor, (Tagged, Convert)):
        yield from _footprint_of_box(tensor.tensor, starts, counts)
    elif isinstance(tensor, Joined):
        for part in tensor.parts:
            yield from _footprint_of_box(part, starts, counts)
    elif isinstance(tensor, Tiled):
        for part, inner in zip(tensor.parts, _inputs(tensor, starts, counts), strict=True):
            yield from _footprint_of_box(part, *inner)
    elif isinstance(tensor, Narrow):
        moved = [start + (tensor.start if dim == tensor.dim else 0) for dim, start in enumerate(starts)]
        yield from _footprint_of_box(tensor.tensor, moved, counts)
    elif isinstance(tensor, Concat):
        for part, inner_starts, inner_counts in _parts_in(tensor, starts, counts):
            yield from _footprint_of_box(part, inner_starts, inner_counts)
    elif isinstance(tensor, (Stored, Picked)):
        item = tensor.dtype.itemsize
        begin = tensor.offset if isinstance(tensor, Stored) else tensor.start * item
        at = sum(start * stride for start, stride in zip(starts, tensor.strides, strict=True))
        dims = sorted((stride * item, count) for stride, count in zip(tensor.strides, counts, strict=True))
        runs = item
        # Merge the dimensions of small stride into the run, and more of them while there would be more than _RUNS runs.
        while dims and (dims[0][0] <= runs + _GAP or math.prod(count for _, count in dims) > _RUNS):
            runs += dims[0][0] * (dims[0][1] - 1)
            del dims[0]
        for indices in itertools.product(*(range(count) for _, count in dims)):
            first = begin + at * item + sum(i * stride for i, (stride, _) in zip(indices, dims, strict=True))
            if isinstance(tensor, Stored):
                yield Range(tensor.file, first, first + runs)
            else:
                yield from footprint(tensor.tensor, first // item, (first + runs) // item)
    elif isinstance(tensor, View) and (box := _same_box(tensor, starts, counts)) is not None:
        yield from _footprint_of_box(tensor.tensor, *box)
    else:
        runs_of_box = list(itertools.islice(_runs(tensor.shape, starts, counts), _RUNS + 1))
        if len(runs_of_box) > _RUNS:
            steps = contiguous_strides(tensor.shape)
            first = sum(start * step for start, step in zip(starts, steps, strict=True))
            last = first + sum((count - 1) * step for count, step in zip(counts, steps, strict=True))
            runs_of_box = [(first, last + 1 - first)]
        for first, length in runs_of_box:
            yield from footprint(tensor, first, first + length)


def blocks(tensor: LazyTensor, size: int = 0) -> Iterator[tuple[list[int], list[int]]]:
    """Yield boxes of at most `size` bytes (0: `BLOCK`) that cover `tensor`, with sides as equal as its shape allows.

    Such a box consists of runs that are not too short, in whatever order the file stores the elements.
    """
    limit = max((size or BLOCK) // tensor.dtype.itemsize, 1)
    sides = [1] * len(tensor.shape)
    while True:
        small = [d for d, side in enumerate(sides) if side < tensor.shape[d]]
        grown = min(small, key=lambda dim: sides[dim], default=None)
        if grown is None or math.prod(sides) * 2 > limit:
            break
        sides[grown] = min(sides[grown] * 2, tensor.shape[grown])
    for starts in itertools.product(
        *(range(0, extent, side) for extent, side in zip(tensor.shape, sides, strict=True))
    ):
        counts = [min(side, extent - at) for side, extent, at in zip(sides, tensor.shape, starts, strict=True)]
        yield list(starts), counts


# ------------------------------------------------------------------------------------------------------- geometry


def _code(dtype: DType) -> str:
    """Return numpy's dtype for an element's bits."""
    return f"u{dtype.itemsize}" if dtype.itemsize <= 8 else f"V{dtype.itemsize}"


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
    """Return the dimension along which a box of a tensor is to be halved, and half of its extent there, as what it is
    made of is more than is read at once; None if it is not."""
    reduced = math.prod(max(axis.num // axis.den, 1) for axis in tensor.axes[0])
    dim = max(range(len(counts)), key=lambda dim: counts[dim], default=0)
    if reduced * math.prod(counts) * tensor.parts[0].dtype.itemsize <= _MOST or not counts or counts[dim] < 2:
        return None
    return (dim, counts[dim] // 2) if isinstance(tensor.kernel, Quantize) and not tensor.whole else None


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
    given = iter(wide)
    dims = [None if extent == 1 else next(given) for extent in inner]
    return [0 if dim is None else starts[dim] for dim in dims], [1 if dim is None else counts[dim] for dim in dims]


# ---------------------------------------------------------------------------------------------------- conversions


def converted(expression: Convert, bits: Array) -> Array:
    """Apply the kernel of `expression` to elements of its tensor."""
    np, kernel, dtype = _numpy(), expression.kernel, expression.tensor.dtype
    result: Array
    if isinstance(kernel, Cast):
        result = np.empty(bits.shape, _code(expression.dtype))
        for at in range(0, len(bits), CAST_BLOCK):
            result[at : at + CAST_BLOCK] = cast(kernel.source, kernel.target, bits[at : at + CAST_BLOCK])
        return result
    if isinstance(kernel, Bits):
        result = bits // bits.dtype.type(1 << kernel.shift)
        if kernel.width < 8 * kernel.itemsize:
            result %= bits.dtype.type(1 << kernel.width)
        return result.astype(_code(expression.dtype))
    rows = np.ascontiguousarray(bits).view("u1").reshape(-1, dtype.itemsize).copy()
    part = itemsize_of_components(dtype)
    if isinstance(kernel, Swap):
        units = rows.reshape(-1, kernel.itemsize)
        rows = np.ascontiguousarray(units[:, ::-1])
    elif isinstance(kernel, Conjugate):
        # The sign is the top bit of the last byte; the imaginary part comes second.
        rows[:, -1] ^= 0x80 if dtype.kind == "c" else 0
    elif isinstance(kernel, Negate):
        if dtype.kind in "iu":
            return 0 - bits
        rows.reshape(-1, part)[:, -1] ^= 0x80
        if dtype.name.endswith("fnuz"):
            # In these formats, zero (0x00) and NaN (0x80) have no negative.
            rows[(rows & 0x7F) == 0] ^= 0x80
    result = rows.reshape(-1).view(_code(dtype))
    return result


def joined(expression: Joined, parts: Sequence[Array]) -> Array:
    """Combine elements of the parts of `expression`. Raise UsageError for a value that does not fit its bits."""
    np, kernel = _numpy(), expression.kernel
    if isinstance(kernel, Overlay):
        laid: Array = parts[0]
        for units in parts[1:]:
            mask = units >> 8
            laid = (laid - (laid & mask) + (units & mask)).astype("u1")
        return laid
    if isinstance(kernel, WeightedSum):
        return _summed(kernel, parts)
    result: Array = np.zeros(parts[0].shape, _code(expression.dtype))
    if isinstance(kernel, Xor):
        for part in parts:
            # a ^ b without carries: the bits that are in either, less those that are in both
            result = (result | part) - (result & part)
        return result
    for part, (_, shift, width) in zip(parts, kernel.kinds, strict=True):
        if part.size and int(part.max()) >= 1 << width:
            raise UsageError(f"A value is {int(part.max())}, and is to be stored in {width} bits.")
        result += part.astype(result.dtype) * result.dtype.type(1 << shift)
    return result


def _summed(kernel: WeightedSum, parts: Sequence[Array]) -> Array:
    """Return the bits of weighted sums: in float64, each product and each sum rounded, in the order of the parts."""
    np = _numpy()
    result: Array = np.empty(parts[0].shape, "u8")
    flat = [part.reshape(-1) for part in parts]
    with np.errstate(all="ignore"):
        for at in range(0, result.size, CAST_BLOCK):
            total: Any = None
            for dtype, weight, part in zip(kernel.dtypes, kernel.weights, flat, strict=True):
                term = weight * values(dtype, part[at : at + CAST_BLOCK])
                total = term if total is None else total + term
            total = total / kernel.over
            result.reshape(-1)[at : at + CAST_BLOCK] = np.where(np.isnan(total), np.nan, total).view("u8")
    return result


class _Given(NamedTuple):
    """A box of an input of a tile: bits of elements of `dtype` from index `starts` on, and what its dimensions are."""

    dtype: str
    bits: Array
    axes: tuple[Axis, ...]
    starts: tuple[int, ...]

    def place(self, indices: Sequence[Array]) -> list[Array]:
        """Return where in `bits` the elements at `indices` are, one array for each of its dimensions; together they
        have the shape of the tile."""
        found = []
        for axis, start in zip(self.axes, self.starts, strict=True):
            shape = [1] * len(indices)
            shape[axis.dim] = -1
            found.append((indices[axis.dim] * axis.num // axis.den - start).reshape(shape))
        return found


# The bits of a code, and those of the word that it lies in; the value of each code of four bits (OCP Microscaling
# Formats 1.0, table 5); and the place in a word that AutoAWQ gives to each of eight.
_PACKED = {"e2m1": (4, 8), "table4": (4, 8), "awq": (4, 32), **{f"int{bits}": (bits, 32) for bits in range(2, 9)}}
_E2M1 = [sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def _dequantized(kernel: Dequantize, parts: Sequence[_Given], indices: Sequence[Array]) -> Array:
    """Return the bits of the weights at `indices`: each product in float64, rounded as the kernel says."""
    np = _numpy()
    given = dict(zip(("codes", *kernel.roles), parts, strict=True))
    table = values("float32", given["table"].bits) if "table" in given else None
    group = given["index"].bits.astype("i4")[given["index"].place(indices)[0]] if "index" in given else None
    with np.errstate(all="ignore"):
        codes = _codes(kernel.codes, given["codes"], indices, table)
        less = codes - kernel.offset
        if "zero" in given:
            stored = "own" if given["zero"].dtype == "int8" else kernel.codes
            less = less - _codes(stored, given["zero"], indices, None, group)
        scale = given["scale"]
        factor = values(scale.dtype, _looked_up(scale, indices, group))
        if not np.isfinite(factor).all():
            raise CorruptError(f"{kernel.scales}: a scale is NaN or infinite.")
        exact = less / factor if kernel.over else less * factor
        made = _nearest(exact, _FORMATS["float32"])
        if "shift" in given:
            made = _nearest(made + values("float32", given["shift"].bits)[0], _FORMATS["float32"])
        made = _nearest(made, _FORMATS[kernel.between])
        if (((factor == 0) & (less != 0)) | (np.isinf(made) & np.isfinite(codes))).any():
            raise CorruptError(f"{kernel.scales}: a scale is 0 where the code is not, or too large.")
        single = np.where(np.isnan(made), np.nan, made).astype("f4").view("u4")
        result: Array = np.broadcast_to(single, [len(each) for each in indices])
    return result


def _looked_up(given: _Given, indices: Sequence[Array], group: Array | None) -> Array:
    """Return the elements of an input for those of a tile, those of a dimension that is whole by `group`."""
    place = given.place(indices)
    for dim, axis in enumerate(given.axes):
        if not axis.num and group is not None:
            if group.size and not 0 <= group.min() <= group.max() < given.bits.shape[dim]:
                raise CorruptError(f"A column is of group {group.max()}, and there are {given.bits.shape[dim]}.")
            place[dim] = group
    found: Array = given.bits[tuple(place)]
    return found


def _codes(
    codes: str, given: _Given, indices: Sequence[Array], table: Array | None, group: Array | None = None
) -> Array:
    """Return the codes of the elements at `indices` as float64 numbers."""
    np = _numpy()
    if codes not in _PACKED:
        bits = _looked_up(given, indices, group)
        plain: Array = _plain(given.dtype, bits) if table is None else table[bits]
        return plain
    width, word = _PACKED[codes]
    (dim,) = (dim for dim, axis in enumerate(given.axes) if (axis.num, axis.den) == (width, word))
    at = indices[given.axes[dim].dim]
    first = at * width
    if word % width == 0:
        number = at // (word // width)
        first = number * word + _within(codes, at % (word // width), word // width) * width
    shape = [1] * len(indices)
    shape[given.axes[dim].dim] = -1
    found: Array = np.zeros((), "i8")
    # A code may begin in one word and end in the next: then it is taken bit by bit.
    taken = width if word % width == 0 else 1
    for bit in range(0, width, taken):
        place = given.place(indices) if group is None else _placed(given, indices, group)
        place[dim] = ((first + bit) // word - given.starts[dim]).reshape(shape)
        words = given.bits[tuple(place)].astype("i8")
        found = found + (words // (1 << ((first + bit) % word).reshape(shape)) % (1 << taken) << bit)
    made: Array = found.astype("f8")
    if table is not None:
        made = table[found]
    elif codes == "e2m1":
        made = np.array(_E2M1)[found]
    return made


def _placed(given: _Given, indices: Sequence[Array], group: Array) -> list[Array]:
    place = given.place(indices)
    return [group if not axis.num else at for axis, at in zip(given.axes, place, strict=True)]


def _within(codes: str, number: Array, count: int) -> Array:
    """Return which of the `count` places in a word, from the lowest bits on, the codes of these numbers have."""
    places: Array = _numpy().array(_AWQ)[number] if codes == "awq" else number
    return count - 1 - places if codes == "table4" else places


def _plain(dtype: str, bits: Array) -> Array:
    """Return numbers of an 8-bit dtype as float64."""
    return bits.view(f"{DTYPES[dtype].kind}1").astype("f8") if dtype in ("uint8", "int8") else values(dtype, bits)


def _quantized(kernel: Quantize, parts: Sequence[_Given], indices: Sequence[Array]) -> Array:
    """Return the bits of codes or scales at `indices`: the exact value of each step in float64, rounded as it is
    stored."""
    np = _numpy()
    (given,) = parts
    *ahead, rows, columns = indices
    of_scales = kernel.made == "scales"
    packed = 1 if of_scales else {"int4": 8, "e2m1": 2}.get(kernel.codes, 1)
    sides = kernel.rows, kernel.columns
    # The blocks, and from there on the numbers that are needed of each dimension.
    blocks = [each // (1 if of_scales else side) for each, side in zip((rows, columns * packed), sides, strict=True)]
    bounds = [(each[0] * side, (each[-1] + 1) * side) for each, side in zip(blocks, sides, strict=True)]
    cuts = [slice(low - start, high - start) for (low, high), start in zip(bounds, given.starts[-2:], strict=True)]
    experts = np.ix_(*(each - start for each, start in zip(ahead, given.starts, strict=False))) if ahead else ...
    within: Any = given.bits[experts]
    numbers = values(given.dtype, within[(..., *cuts)])
    if not np.isfinite(numbers).all():
        raise UnsupportedError(f"{kernel.name!r} has NaN or infinity.")
    # Zeros fill the blocks at the edges.
    filled = np.zeros((*numbers.shape[:-2], *(high - low for low, high in bounds)))
    filled[(..., *(slice(extent) for extent in numbers.shape[-2:]))] = numbers
    few = filled.reshape(*filled.shape[:-2], filled.shape[-2] // sides[0], sides[0], -1, sides[1])
    scale = _scale_of(kernel, np.abs(few).max((-3, -1)))
    if of_scales:
        made: Array = _scale_bits(kernel.scale, scale)
        return made
    quotient = _nearest(few / scale[..., :, None, :, None], _FORMATS["float32"]).reshape(filled.shape)
    if kernel.codes == "int4":
        codes = np.clip(np.rint(quotient), -8, 7)
        exact = codes
        wide = (codes + 8).astype("u4").reshape(*codes.shape[:-1], -1, 8)
        stored = sum(wide[..., at] * np.uint32(16**at) for at in range(8))
    elif kernel.codes == "e2m1":
        exact = _nearest(np.clip(quotient, -6, 6), _Format(2, 0, 2))
        nibbles = (np.searchsorted(_E2M1[:8], np.abs(exact)) + 8 * np.signbit(quotient)).astype("u1")
        stored = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    else:
        exact = _nearest(np.clip(quotient, -448, 448), _Format(4, -6, 8))
        fraction, exponent = np.frexp(np.abs(exact))
        place = np.where(np.abs(exact) < 2.0**-6, np.abs(exact) * 512, exponent * 8 + 40 + fraction * 16)
        stored = (place + 128 * np.signbit(quotient)).astype("u1")
    if kernel.exact:
        again = exact.reshape(few.shape) * scale[..., :, None, :, None]
        if (again != few).any():
            raise UnsupportedError(f"{kernel.name!r} has numbers that codes and scales do not give exactly.")
    at = rows - bounds[0][0], columns - bounds[1][0] // packed
    taken: Array = stored[..., at[0][:, None], at[1]]
    return taken


def _scale_of(kernel: Quantize, most: Array) -> Array:
    """Return the scales of blocks, of which the largest absolute values are `most`."""
    np = _numpy()
    least = 2.0**-126
    exact = most / kernel.largest
    if kernel.power:
        # The exponent of the smallest power of two that is no smaller.
        _, exponent = np.frexp(np.maximum(exact, least))
        power = np.ldexp(1.0, exponent - 1)
        scale = np.where(power * kernel.largest < most, 2 * power, power)
    else:
        scale = np.maximum(_nearest(exact, _FORMATS["float32"]), least)
        if kernel.scale == "bfloat16":
            scale = _nearest(scale, _FORMATS["bfloat16"])
    made: Array = np.where(most == 0, 1.0, scale)
    return made


def _scale_bits(dtype: str, scale: Array) -> Array:
    """Return the bits of scales."""
    np = _numpy()
    if dtype == "float8_e8m0fnu":
        powers: Array = (np.frexp(scale)[1] + 126).astype("u1")
        return powers
    single: Array = scale.astype("f4").view("u4")
    return single if dtype == "float32" else (single // (1 << 16)).astype("u2")


def _rescaled(kernel: Rescale, parts: Sequence[_Given], indices: Sequence[Array]) -> Array:
    """Return the bits of the scales of NVFP4 at `indices`, or of the one that divides them: as exact powers of two."""
    np = _numpy()
    every = values("float8_e8m0fnu", parts[-1].bits.reshape(-1))
    if np.isnan(every).any():
        raise CorruptError(f"{kernel.name}: a scale is NaN.")
    most = max(float(every.max()), 2.0**-119) if every.size else 2.0**-119
    if kernel.made == "global":
        only: Array = np.full([len(each) for each in indices], 256 / most, "f4").view("u4")
        return only
    rows, columns = indices
    codes, scales, _ = parts
    own = values("float8_e8m0fnu", scales.bits[rows - scales.starts[0]][:, columns // 2 - scales.starts[1]])
    wanted = own / most * 256
    places = (columns * 8 - codes.starts[1])[:, None] + np.arange(8)
    sizes = codes.bits[(rows - codes.starts[0])[:, None, None], places[None]] % 128
    has_numbers = ((sizes % 8) + (sizes // 16)).sum(-1) > 0
    if (has_numbers & (wanted < 2.0**-9)).any():
        raise UnsupportedError(f"{kernel.name!r} has scales that are too far apart for NVFP4.")
    table = np.array(_table("float8_e4m3fn"))[:127]
    made: Array = np.where(wanted < 2.0**-9, 0, np.searchsorted(table, wanted)).astype("u1")
    return made


def _with_product(kernel: LowRank, parts: Sequence[_Given], indices: Sequence[Array]) -> Array:
    """Return the bits of what a product of factors is added to: each number rounded to float64, in order."""
    np = _numpy()
    base, left, right = (values(given.dtype, given.bits) for given in parts)
    rows, columns = parts[1].place(indices)[0], parts[2].place(indices)[1]
    with np.errstate(all="ignore"):
        total = np.zeros([len(each) for each in indices])
        for inner in range(left.shape[1]):
            total = total + left[rows, inner] * right[inner, columns]
        made = base[tuple(parts[0].place(indices))] + kernel.scale * total
        bits: Array = np.where(np.isnan(made), np.nan, made).view("u8")
    return bits


def _with_lengths(kernel: Magnitude, parts: Sequence[_Given], indices: Sequence[Array]) -> Array:
    """Return the bits of rows that have other lengths: their squares are added column by column."""
    np = _numpy()
    rows, lengths = (values(given.dtype, given.bits) for given in parts)
    with np.errstate(all="ignore"):
        squares = np.zeros(len(rows))
        for column in range(rows.shape[1]):
            squares = squares + rows[:, column] ** 2
        factors = lengths / squares**0.5
        at = (indices[0] - parts[0].starts[0])[:, None]
        made = rows[at, indices[1][None, :]] * factors[at]
        bits: Array = np.where(np.isnan(made), np.nan, made).view("u8")
    return bits


# What makes the bits of a tile, by kernel.
_TILES: dict[type, Callable[[Any, Sequence[_Given], Sequence[Array]], Array]] = {
    Dequantize: _dequantized,
    Quantize: _quantized,
    Rescale: _rescaled,
    LowRank: _with_product,
    Magnitude: _with_lengths,
}


class _Format(NamedTuple):
    """A floating-point format: the bits of its significand (with the implicit one), and the exponents of its smallest
    and largest normal numbers. `maximum` is its largest finite number."""

    digits: int
    least: int
    greatest: int

    @property
    def maximum(self) -> float:
        return math.ldexp(2.0 - math.ldexp(1.0, 1 - self.digits), self.greatest)


# IEEE 754-2019, table 3.5; bfloat16 has float32's exponents and eight digits.
_FORMATS = {
    "float64": _Format(53, -1022, 1023),
    "float32": _Format(24, -126, 127),
    "bfloat16": _Format(8, -126, 127),
    "float16": _Format(11, -14, 15),
}
# 8-bit formats: bits of exponent, bits of mantissa, and bias. OCP 8-bit Floating Point Specification 1.0, and
# arXiv:2206.02915 for those whose only NaN is minus zero.
_BYTES = {
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2fnuz": (5, 2, 16),
    "float8_e4m3fnuz": (4, 3, 8),
}


def cast(source: str, target: str, bits: Array) -> Array:
    """Cast elements of dtype `source` to dtype `target`: round to nearest, ties to even.

    Overflow gives infinity. A NaN keeps its sign, and the leading bits of its payload that fit. It becomes quiet,
    except from bfloat16 to float32: bfloat16 is the upper half of float32.
    """
    np = _numpy()
    if source == target:
        return bits
    if target not in _FORMATS or source not in (*_FORMATS, *_BYTES, "float8_e8m0fnu"):
        raise UnsupportedError(f"A cast from {source} to {target} cannot be verified: there is no reference for it.")
    with np.errstate(all="ignore"):
        exact = values(source, bits)
        rounded = _nearest(exact, _FORMATS[target])
        if target == "bfloat16":
            result: Array = (rounded.astype("f4").view("u4") >> 16).astype("u2")
        else:
            result = rounded.astype(target).view(_code(DTYPES[target]))
    (nans,) = np.nonzero(np.isnan(exact))
    if len(nans):
        result[nans] = _nan(source, target, bits[nans].astype("u8"))
    return result


def values(dtype: str, bits: Array) -> Array:
    """Return the exact value of each element of a floating dtype, as float64."""
    np = _numpy()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if dtype == "bfloat16":
            array: Array = (bits.astype("u4") << 16).view("f4").astype("f8")
        elif dtype in _FORMATS:
            array = bits.view(dtype).astype("f8")
        else:
            array = np.array(_table(dtype))[bits]
    return array


def _nearest(exact: Array, format_: _Format) -> Array:
    """Round each number to a multiple of the unit in the last place that `format_` has at its magnitude."""
    np = _numpy()
    _, exponent = np.frexp(exact)  # exact = m · 2^exponent, ½ <= m < 1
    last = np.maximum(exponent - 1, format_.least) - (format_.digits - 1)
    # Scaling by powers of two is exact; rint rounds halves to even.
    rounded = np.ldexp(np.rint(np.ldexp(exact, -last)), last)
    array: Array = np.where(np.abs(rounded) > format_.maximum, np.copysign(np.inf, exact), rounded)
    return array


def _nan(source: str, target: str, bits: Array) -> Array:
    """Return the bits of NaNs of `source` as NaNs of `target`."""
    digits, width = _layout(source)
    new_digits, new_width = _layout(target)
    sign = bits >> (width - 1) if digits else 0 * bits  # float8_e8m0fnu has no sign
    payload = bits & ((1 << digits) - 1)
    payload = payload << (new_digits - digits) if new_digits >= digits else payload >> (digits - new_digits)
    if (source, target) != ("bfloat16", "float32"):
        payload |= 1 << (new_digits - 1)
    infinity = ((1 << (new_width - 1 - new_digits)) - 1) << new_digits
    made: Array = (sign << (new_width - 1)) | payload | infinity
    return made


def _layout(dtype: str) -> tuple[int, int]:
    """Return the bits of the mantissa, and of the whole number."""
    mantissa = _FORMATS[dtype].digits - 1 if dtype in _FORMATS else _BYTES[dtype][1] if dtype in _BYTES else 0
    return mantissa, DTYPES[dtype].itemsize * 8


@functools.cache
def _table(dtype: str) -> tuple[float, ...]:
    """Return the value of each of the 256 bytes."""
    return tuple(_byte(dtype, bits) for bits in range(256))


def _byte(dtype: str, bits: int) -> float:
    if dtype == "float8_e8m0fnu":
        return math.nan if bits == 255 else math.ldexp(1.0, bits - 127)
    exponent_bits, mantissa_bits, bias = _BYTES[dtype]
    sign = -1.0 if bits >= 128 else 1.0
    exponent, mantissa = divmod(bits & 127, 1 << mantissa_bits)
    top = (1 << exponent_bits) - 1
    if dtype == "float8_e5m2" and exponent == top:
        return sign * math.inf if mantissa == 0 else math.nan
    if (dtype == "float8_e4m3fn" and bits & 127 == 127) or (dtype.endswith("fnuz") and bits == 128):
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def shown(dtype: DType, bits: bytes) -> str:
    """Return an element as text: its value, and its bits if the value does not determine them."""
    np = _numpy()
    hexadecimal = bits[::-1].hex()
    if dtype.kind == "f":
        return f"{float(values(dtype.name, np.frombuffer(bits, _code(dtype)))[0])!r} (bits {hexadecimal})"
    if dtype.kind in "iu":
        return str(int.from_bytes(bits, "little", signed=dtype.kind == "i"))
    if dtype.kind == "b" and bits in (b"\0", b"\1"):
        return str(bits == b"\1")
    return f"bits {hexadecimal}"
