"""Computed tensors: kernels that take several elements, or parts of words, and `Tiled`, computed tile by tile.

Most checkpoints are only moved: they need none of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import Composed, LazyTensor, Picked, Stored, untagged
from ckptconv.tensors.moves import BLOCK, Assembled, Kernel, Move, Order, Runs
from ckptconv.tensors.strides import contiguous_strides, is_contiguous

# Bytes of an input of a tile, if whole rows or columns of it are needed.
MOST_NEEDED = 8 << 20

# -------------------------------------------------------------------------------------------------------- kernels


class Bits(NamedTuple):
    """Take `width` bits from bit `shift` of every unsigned integer of `itemsize` bytes, as one of `result` bytes."""

    itemsize: int
    shift: int
    width: int
    result: int


class Join(NamedTuple):
    """Combine unsigned integers of several kinds into integers of `result` bytes.

    The input has the same number of each kind, kind after kind. `kinds` are (bytes of one integer, its first bit in the
    result, its number of bits there).
    """

    kinds: tuple[tuple[int, int, int], ...]
    result: int


class Tiling(NamedTuple):
    """Properties of a kernel's tiles: the `tiling` of a kernel, or else these defaults. For a `Tiled`:

    - `cast_from` is the size of an element (bytes) before the kernel casts it, None if it casts none.
    - `sides` are the sides of tiles of at most so many elements, () for whole rows.
    - `most` is the most elements of a tile, None if there is no such number.
    - `unrounded` is the kernel that does the same, and does not round its result.
    - `decodes`: it computes weights from codes.
    """

    cast_from: Callable[[Tiled], int | None] = lambda tensor: None
    sides: Callable[[Tiled, int], tuple[int, ...]] = lambda tensor, most: ()
    most: Callable[[Tiled], int | None] = lambda tensor: None
    unrounded: Callable[[Any], Kernel] = lambda kernel: kernel
    decodes: bool = False


_TILING = Tiling()


class Box(NamedTuple):
    """Part of an input of a tile: elements of `dtype`, `counts` of them from index `starts` on along each dimension.

    `axes` describe its dimensions (`Axis`). It lies at byte `offset` of the tile's source.
    """

    offset: int
    dtype: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    axes: tuple[Any, ...]


class Tile(NamedTuple):
    """Compute the tile of `counts` elements from index `starts` on from boxes of several inputs, by `kernel`.

    `cast` is the dtype to which its elements are cast as they are computed, if that is another.
    """

    kernel: Kernel
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    boxes: tuple[Box, ...]
    cast: str = ""


# --------------------------------------------------------------------------------------------- the tensor of tiles


class Axis(NamedTuple):
    """A dimension of an input, in relation to a tensor that is computed tile by tile.

    Element i along dimension `dim` of the tensor needs elements ⌊i·num/den⌋ to ⌈(i+1)·num/den⌉ of the input along this
    one: 1/128 for the scales of blocks of 128, 4/32 for words of 32 bits that hold codes of 4. Every element needs all
    of them if `num` is 0.
    """

    dim: int
    num: int = 1
    den: int = 1

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        """Return the interval of this dimension, which has `extent` elements, that `start` to `stop` of `dim` need."""
        if not self.num:
            return 0, extent
        return min(start * self.num // self.den, extent), min(-(-stop * self.num // self.den), extent)


class Computed(Composed):
    """A tensor computed from several others, tile by tile: a tile needs only parts of them."""

    __slots__ = ()
    # Bytes at a multiple of which each input begins in the source of a tile.
    ALIGNMENT = 1

    @property
    def computed(self) -> bool:
        return True

    def _tiles(self, first: int, last: int, most: int, order: Order) -> Iterator[TileOf]:
        """Yield tiles of at most `most` elements that cover elements `first` to `last`."""
        raise NotImplementedError

    def _kernel(self, tile: TileOf, offsets: Sequence[int]) -> Kernel:
        """Return the kernel that computes `tile` from inputs at these `offsets`."""
        raise NotImplementedError

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        item = self.dtype.itemsize
        if start >= stop:
            return
        if stop - start != self.nbytes:
            order = "output"
        from ckptconv.tensors.geometry import trim

        for tile in self._tiles(start // item, -(-stop // item), max(limit // self._widest, 1), order):
            moves: list[Move] = []
            offsets = []
            at = 0
            for inner, low, high in tile.inputs:
                at += -at % self.ALIGNMENT
                offsets.append(at)
                inner_moves = inner.moves(low, high, "output", limit)
                moves.extend(move._replace(target=move.target.shifted(at - low)) for move in inner_moves)
                at += high - low
            whole = Move(tile.target, None, Assembled(tuple(moves), at), (self._kernel(tile, offsets),))
            yield from trim(whole, start, stop)

    @property
    def _widest(self) -> int:
        """The bytes of an element, or of the input read for it if these are more."""
        return self.dtype.itemsize


class TileOf(NamedTuple):
    """A tile: where it goes, its box (index and number of elements along each dimension), and its inputs, each a tensor
    and the interval of its bytes; the boxes of these, where they matter."""

    target: Runs
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    inputs: Sequence[tuple[LazyTensor, int, int]]
    boxes: Sequence[tuple[LazyTensor, tuple[int, ...], tuple[int, ...]]] = ()


class Joined(Computed):
    """Tensors of one shape combined by `kernel`, element by element, into elements of `dtype`."""

    __slots__ = ("dtype", "kernel", "parts")

    def __init__(self, parts: tuple[LazyTensor, ...], kernel: Kernel, dtype: DType) -> None:
        self.parts = parts
        self.kernel = kernel
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.parts[0].shape

    @property
    def _widest(self) -> int:
        return max(self.dtype.itemsize, sum(part.dtype.itemsize for part in self.parts))

    def _tiles(self, first: int, last: int, most: int, order: Order) -> Iterator[TileOf]:
        item = self.dtype.itemsize
        for low in range(first, last, most):
            high = min(low + most, last)
            inputs = [(part, low * part.dtype.itemsize, high * part.dtype.itemsize) for part in self.parts]
            yield TileOf(Runs(low * item, (high - low) * item), (low,), (high - low,), inputs)

    def _kernel(self, tile: TileOf, offsets: Sequence[int]) -> Kernel:
        return self.kernel


class Tiled(Computed):
    """A tensor computed by `kernel`, tile by tile: `axes` say for each dimension of a part which elements a tile needs.

    It is a box of the tensor that `axes` describe, from index `starts` on. `whole` are the sides of the tiles, at
    multiples of them, for which the kernel needs the inputs of every element; () if an element needs its own only.
    """

    __slots__ = ("axes", "dtype", "kernel", "parts", "shape", "starts", "whole")

    def __init__(
        self,
        parts: tuple[LazyTensor, ...],
        axes: tuple[tuple[Axis, ...], ...],
        kernel: Kernel,
        dtype: DType,
        shape: tuple[int, ...],
        starts: tuple[int, ...],
        whole: tuple[int, ...] = (),
    ) -> None:
        self.parts = parts
        self.axes = axes
        self.kernel = kernel
        self.dtype = dtype
        self.shape = shape
        self.starts = starts
        self.whole = whole

    @property
    def scattered(self) -> bool:
        along = [axis.dim for axis in self.axes[0] if self.shape[axis.dim] > 1]
        # Rows that need several whole rows of an input are computed together.
        deep = any(side > 1 for side, extent in zip(self.whole[:-1], self.shape, strict=False) if extent > 1)
        return along != sorted(along) or deep or self.parts[0].scattered

    @property
    def cast_from(self) -> int | None:
        return self.tiling.cast_from(self)

    @property
    def tiling(self) -> Tiling:
        """The division into tiles."""
        tiling: Tiling = getattr(self.kernel, "tiling", _TILING)
        return tiling

    @property
    def grain(self) -> int:
        return self.shape[-1] * self.dtype.itemsize if len(self.shape) > 1 else 0

    @property
    def _widest(self) -> int:
        # A tile needs no more bytes than it has, except for inputs that a larger one needs whole, and for reductions.
        reduced = math.prod(max(-(-axis.num // axis.den), 1) for axis in self.axes[0])
        return max(self.dtype.itemsize, self.parts[0].dtype.itemsize * reduced if self.whole or reduced > 1 else 0)

    def _tiles(self, first: int, last: int, most: int, order: Order) -> Iterator[TileOf]:
        from ckptconv.tensors.geometry import bands, boxes_of, cells, tiles

        item, steps = self.dtype.itemsize, contiguous_strides(self.shape)
        sides = self.tiling.sides(self, most)
        most = 1 if sides else min(most, self._at_once)
        sides = sides or self.whole
        most = min(most, self.tiling.most(self) or most)
        if sides:
            for band in bands(self.shape, steps, first, last, max(self.numel, 1), item):
                place = self._place(band.target.offset // item, [count for count, _ in band.dims])
                for target, at, counts in cells(self.shape, place, self.starts, sides, most, item):
                    starts = tuple(index + start for index, start in zip(at, self.starts, strict=True))
                    needed = list(self._boxes(starts, counts))
                    yield TileOf(target, starts, counts, [self._input(*box) for box in needed], needed)
            return
        if order == "source" and self.scattered:
            strides = self._source_strides()
            boxes = boxes_of(tiles(self.shape, strides, most, item), strides)
        else:
            boxes = bands(self.shape, steps, first, last, most, item)
        for box in boxes:
            at, counts = self._place(box.target.offset // item, [count for count, _ in box.dims])
            starts = tuple(index + start for index, start in zip(at, self.starts, strict=True))
            needed = list(self._boxes(starts, counts))
            yield TileOf(box.target, starts, counts, [self._input(*inner) for inner in needed], needed)

    def _place(self, at: int, inner: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the index of element `at`, and the extent of a box from there on that has `inner` along the last
        dimensions."""
        steps = contiguous_strides(self.shape)
        index = tuple(at // step % extent for step, extent in zip(steps, self.shape, strict=True))
        return index, (1,) * (len(self.shape) - len(inner)) + tuple(inner)

    @property
    def _at_once(self) -> int:
        """The most elements of a tile: of an input, each row or column that it needs may be long."""
        most, columns = MOST_NEEDED, self.shape[-1] if self.shape else 1
        for part, axes in zip(self.parts, self.axes, strict=True):
            needed = {axis.dim for axis in axes if axis.num}
            length = part.dtype.itemsize * math.prod(
                extent for axis, extent in zip(axes, part.shape, strict=True) if not axis.num
            )
            if len(needed) == 1 and needed != {len(self.shape) - 1}:
                # A tile of whole rows needs it once for each row; a tile of a part of a row, once.
                most = min(most, max(MOST_NEEDED // max(length, 1), 1) * columns)
            elif needed and length * columns > MOST_NEEDED:
                most = min(most, max(MOST_NEEDED // length, 1))
        return most

    def _source_strides(self) -> tuple[int, ...]:
        """Return strides that order the dimensions as the codes have them."""
        order = [axis.dim for axis in self.axes[0]]
        order = [*(dim for dim in range(len(self.shape)) if dim not in order), *order]
        strides = dict(zip(order, contiguous_strides([self.shape[dim] for dim in order]), strict=True))
        return tuple(strides[dim] for dim in range(len(self.shape)))

    def _boxes(
        self, starts: tuple[int, ...], counts: tuple[int, ...]
    ) -> Iterator[tuple[LazyTensor, tuple[int, ...], tuple[int, ...]]]:
        """Yield each part, with the box that a tile needs of it: where it starts, and its sides."""
        sides = self.whole or (1,) * len(starts)
        low = [start // side * side for start, side in zip(starts, sides, strict=True)]
        high = [-(-(start + count) // side) * side for start, count, side in zip(starts, counts, sides, strict=True)]
        for part, axes in zip(self.parts, self.axes, strict=True):
            spans = [
                axis.needed(low[axis.dim], high[axis.dim], extent)
                for axis, extent in zip(axes, part.shape, strict=True)
            ]
            yield part, tuple(first for first, _ in spans), tuple(last - first for first, last in spans)

    def _input(self, part: LazyTensor, starts: tuple[int, ...], counts: tuple[int, ...]) -> tuple[LazyTensor, int, int]:
        """Return the box of `part`, as a tensor and an interval of its bytes."""
        item, steps = part.dtype.itemsize, contiguous_strides(part.shape)
        first = sum(start * step for start, step in zip(starts, steps, strict=True))
        if is_contiguous(counts, steps):
            return part, first * item, (first + math.prod(counts)) * item
        part = untagged(part)
        if isinstance(part, Stored):
            first = sum(start * stride for start, stride in zip(starts, part.strides, strict=True))
            box: LazyTensor = Stored(part.file, part.offset + first * item, part.dtype, counts, part.strides)
        else:
            box = Picked(part, first, counts, steps)
        return box, 0, box.nbytes

    def _kernel(self, tile: TileOf, offsets: Sequence[int]) -> Kernel:
        inputs = zip(offsets, tile.boxes, self.axes, strict=True)
        boxes = (Box(at, part.dtype.name, starts, counts, axes) for at, (part, starts, counts), axes in inputs)
        return Tile(self.kernel, tile.starts, tile.counts, tuple(boxes))

    ALIGNMENT = 16
