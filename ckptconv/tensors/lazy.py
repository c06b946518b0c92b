"""`LazyTensor` expressions: where the bytes of a tensor are, and the `Move`s that produce them.

A `LazyTensor` is a dtype, a shape and an expression over byte ranges of files. It holds no data and opens no file. It
answers one question: which source bytes make up bytes `start` to `stop` of this tensor (C order, little-endian)? The
answer is a stream of `Move`s, each no larger than one buffer. Threads, resume, remote reads and joining of partitions
all work because any process can ask this for any interval at any time.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.geometry import (
    bands,
    boxes_of,
    cells,
    contiguous_strides,
    gather,
    is_contiguous,
    row_runs,
    spread,
    tiles,
    trim,
)
from ckptconv.tensors.moves import (
    BLOCK,
    CASTING,
    GAP,
    Assembled,
    Box,
    Cast,
    Dequantize,
    File,
    Kernel,
    LowRank,
    Move,
    Order,
    Runs,
    Tile,
)

# Bytes of one move of a `Picked` tensor, which may consist of as many runs as elements; and runs, if those are longer.
_PICKED_AT_ONCE, _RUNS_AT_ONCE = 1 << 16, 512
# Bytes of an input of a tile, if whole rows or columns of it are needed.
_MOST_NEEDED = 8 << 20
# Elements of a tile whose codes are decoded all at once.
_MOST_DECODED = 1 << 18
_INNER = File("", 0)
# A name, and two tensors found under it of which one is kept: their bytes have to be equal.
Equal: TypeAlias = "tuple[str, LazyTensor, LazyTensor]"


# ------------------------------------------------------------------------------------------------------ LazyTensor


class LazyTensor:
    """A tensor that is not loaded: `dtype`, `shape`, and where its bytes are. The base class of all expressions.

    Nobody changes one: they are shared, and keys of dicts. There may be a million, and frozen dataclasses take four
    times as long to make.
    """

    __slots__ = ()
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def scattered(self) -> bool:
        """Whether output order takes far more reads than source order, as for a transposed matrix."""
        return False

    @property
    def computed(self) -> bool:
        """Whether elements are computed of several, which takes longer than to move them, or to cast them."""
        return False

    @property
    def grain(self) -> int:
        """The bytes of a row of a tensor that is computed by rows: cut within one, it is computed in more tiles. 0 if
        it may be cut anywhere."""
        return 0

    def inputs(self) -> tuple[File, ...]:
        """Return the files that its bytes come from; a file may occur more than once."""
        raise NotImplementedError

    def origin(self) -> tuple[str, int]:
        """Return the path and offset of its first byte: tensors sorted by this are read forwards."""
        raise NotImplementedError

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        """Yield the moves that make bytes `start` to `stop`; their targets count from the first byte of the tensor.

        Together the targets cover the interval once. In "source" order, the moves of a whole tensor come in file order,
        wherever they go. No move makes more than `limit` bytes. None reads more than about twice that; in "source"
        order, none reads more than `limit`.
        """
        raise NotImplementedError


class Derived(LazyTensor):
    """A tensor made from one other."""

    __slots__ = ()
    tensor: LazyTensor

    @property
    def scattered(self) -> bool:
        return self.tensor.scattered

    @property
    def computed(self) -> bool:
        return self.tensor.computed

    @property
    def grain(self) -> int:
        return self.tensor.grain

    def inputs(self) -> tuple[File, ...]:
        return self.tensor.inputs()

    def origin(self) -> tuple[str, int]:
        return self.tensor.origin()


class Composed(LazyTensor):
    """A tensor made from several others."""

    __slots__ = ()
    parts: tuple[LazyTensor, ...]

    @property
    def computed(self) -> bool:
        return any(part.computed for part in self.parts)

    def inputs(self) -> tuple[File, ...]:
        return tuple(itertools.chain.from_iterable(part.inputs() for part in self.parts))

    def origin(self) -> tuple[str, int]:
        return self.parts[0].origin()


class Virtual(LazyTensor):
    """A tensor that is in no file."""

    __slots__ = ()

    def inputs(self) -> tuple[File, ...]:
        return ()

    def origin(self) -> tuple[str, int]:
        return "", 0


@dataclass(unsafe_hash=True, slots=True)
class Stored(LazyTensor):
    """Elements in a file from byte `offset`, laid out by `strides` (in elements; stride 0 repeats an element)."""

    file: File
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    @property
    def scattered(self) -> bool:
        return _is_scattered(self.shape, self.strides, self.dtype.itemsize)

    def inputs(self) -> tuple[File, ...]:
        return (self.file,)

    def origin(self) -> tuple[str, int]:
        return self.file.path, self.offset

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        if start >= stop:
            return
        if self.contiguous:
            for at in range(start, stop, limit):
                length = min(limit, stop - at)
                yield Move(Runs(at, length), self.file, Runs(self.offset + at, length))
            return
        item = self.dtype.itemsize
        if order == "source" and start == 0 and stop == self.nbytes:
            boxes = boxes_of(tiles(self.shape, self.strides, limit // item, item), self.strides)
        else:
            boxes = bands(self.shape, self.strides, start // item, -(-stop // item), limit // item, item)
        for box in boxes:
            most = 2 * limit if order == "output" else limit
            yield from trim(gather(self.file, self.offset, box, item, most), start, stop)


# There are many tensors, but few distinct shapes.
@functools.lru_cache(maxsize=4096)
def _is_scattered(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    # `run`: bytes that are contiguous both in the file and in the result. If they are few, the order matters.
    run = item
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1:
            if stride * item > run + GAP:
                return run < 2 * GAP
            run = max(run, extent * stride * item)
    return False


def whole(file: File) -> Stored:
    """Return all bytes of `file`, as uint8."""
    return Stored(file, 0, DTYPES["uint8"], (file.size,), (1,))


@dataclass(unsafe_hash=True, slots=True)
class Partitioned(LazyTensor):
    """A parameter cut into equal pieces, one on every rank (ZeRO-3), joined in rank order.

    Rank r holds `piece` elements from byte `bases[r] + offset` of `files[r]`. All pieces together may be longer than
    the tensor; the rest is padding. All parameters of a flat group share the tuples `files` and `bases`.
    """

    files: tuple[File, ...]
    bases: tuple[int, ...]
    offset: int
    piece: int
    dtype: DType
    shape: tuple[int, ...]

    def inputs(self) -> tuple[File, ...]:
        return self.files

    def origin(self) -> tuple[str, int]:
        return self.files[0].path, self.bases[0] + self.offset

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        piece = self.piece * self.dtype.itemsize
        while start < stop:
            rank, within = divmod(start, piece)
            length = min(piece - within, stop - start, limit)
            yield Move(Runs(start, length), self.files[rank], Runs(self.bases[rank] + self.offset + within, length))
            start += length


@dataclass(unsafe_hash=True, slots=True)
class Concat(Composed):
    """Tensors of one dtype joined along `dim`; their other dimensions are equal."""

    parts: tuple[LazyTensor, ...]
    dim: int = 0
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    # Where each part begins inside a row (bytes); a row is the span of one index of the dimensions before `dim`.
    starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first, dim = self.parts[0], self.dim
        for part in self.parts:
            if part.dtype != first.dtype or part.shape[:dim] + part.shape[dim + 1 :] != (
                first.shape[:dim] + first.shape[dim + 1 :]
            ):
                raise ValueError(f"cannot join {part.dtype} {part.shape} to {first.dtype} {first.shape} along {dim}")
        extent = sum(part.shape[dim] for part in self.parts)
        unit = math.prod(first.shape[dim + 1 :]) * first.dtype.itemsize
        starts = itertools.accumulate((part.shape[dim] * unit for part in self.parts), initial=0)
        self.dtype = first.dtype
        self.shape = (*first.shape[:dim], extent, *first.shape[dim + 1 :])
        self.starts = tuple(starts)

    @property
    def scattered(self) -> bool:
        return any(part.scattered for part in self.parts)

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        row = self.starts[-1]
        if order == "source" and stop - start == self.nbytes and all(map(_makes_boxes, self.parts)):
            for part, begin, end in zip(self.parts, self.starts, self.starts[1:], strict=False):
                for move in part.moves(0, part.nbytes, order, limit):
                    yield from spread(move, end - begin, row, begin)
            return
        for first, last, low, high in row_runs(start, stop, row, limit):
            index = bisect.bisect_right(self.starts, low) - 1
            while index < len(self.parts) and self.starts[index] < high:
                begin, width = self.starts[index], self.starts[index + 1] - self.starts[index]
                part_low, part_high = max(low - begin, 0), min(high - begin, width)
                if part_low < part_high:
                    # Full rows are one interval of the part; a partial row always comes alone.
                    inner = self.parts[index].moves(
                        first * width + part_low, (last - 1) * width + part_high, order, limit
                    )
                    for move in inner:
                        yield from spread(move, width, row, begin)
                index += 1


@dataclass(unsafe_hash=True, slots=True)
class Narrow(Derived):
    """`length` indices of `tensor` along `dim`, from `start`."""

    tensor: LazyTensor
    dim: int
    start: int
    length: int

    def __post_init__(self) -> None:
        extent = self.tensor.shape[self.dim]
        if not 0 <= self.start <= self.start + self.length <= extent:
            raise ValueError(f"[{self.start}, {self.start + self.length}) is not inside a dimension of {extent}")

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        shape = self.tensor.shape
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        shape = self.tensor.shape
        unit = math.prod(shape[self.dim + 1 :]) * self.dtype.itemsize
        outer, inner, skip = shape[self.dim] * unit, self.length * unit, self.start * unit
        while start < stop:
            row, within = divmod(start, inner)
            length = min(inner - within, stop - start)
            distance = row * inner - row * outer - skip
            for move in self.tensor.moves(start - distance, start - distance + length, "output", limit):
                yield move._replace(target=move.target.shifted(distance))
            start += length


@dataclass(unsafe_hash=True, slots=True)
class View(Derived):
    """The same bytes with another dtype or shape."""

    tensor: LazyTensor
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.nbytes != self.tensor.nbytes:
            raise ValueError(f"{self.tensor.nbytes} bytes cannot be seen as {self.dtype} {self.shape}")

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        return self.tensor.moves(start, stop, order, limit)


@dataclass(unsafe_hash=True, slots=True)
class Picked(Derived):
    """Elements of `tensor`: from element `start` of its C order on, by `strides` (in elements)."""

    tensor: LazyTensor
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.tensor.dtype

    @property
    def scattered(self) -> bool:
        return False

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        if start >= stop:
            return
        # The elements of the tensor as they lie in its own bytes, in C order, are the file that a strided tensor is in.
        item, limit = self.dtype.itemsize, min(limit, max(_PICKED_AT_ONCE, _RUNS_AT_ONCE * self._run))
        # Elements with small gaps between them are read together with these: make boxes of fewer.
        most = max(int(limit / _density(self.shape, self.strides, item)) // item, 1)
        for box in bands(self.shape, self.strides, start // item, -(-stop // item), most, item):
            for move in self._made(gather(_INNER, self.start * item, box, item, 2 * limit), limit):
                yield from trim(move, start, stop)

    @property
    def _run(self) -> int:
        """The bytes that are contiguous both in the inner tensor and in this one."""
        run = self.dtype.itemsize
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent > 1:
                if stride * self.dtype.itemsize != run:
                    break
                run *= extent
        return run

    def _made(self, move: Move, limit: int) -> Iterator[Move]:
        """Yield `move`, which reads bytes of the inner tensor, as moves that read files."""
        assert isinstance(move.source, Runs)
        parts = self._read(move.source, limit)
        if move.kernels:
            yield Move(move.target, None, Assembled(tuple(parts), move.source.nbytes), move.kernels)
        else:
            for part in parts:
                yield part._replace(target=part.target.shifted(move.target.offset))

    def _read(self, source: Runs, limit: int) -> Iterator[Move]:
        """Yield the moves that make the runs `source` of the inner tensor, packed one after the other."""
        for number, offset in enumerate(source.offsets()):
            distance = number * source.length - offset
            for move in self.tensor.moves(offset, offset + source.length, "output", limit):
                yield move._replace(target=move.target.shifted(distance))


@dataclass(unsafe_hash=True, slots=True)
class Convert(Derived):
    """`tensor` with every element converted by `kernel` to an element of `dtype`."""

    tensor: LazyTensor
    kernel: Kernel
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.tensor.shape

    @property
    def grain(self) -> int:
        return self.tensor.grain * self.dtype.itemsize // self.tensor.dtype.itemsize

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        before, after = self.tensor.dtype.itemsize, self.dtype.itemsize
        first, last = start // after, -(-stop // after)
        if stop - start != self.nbytes:
            order = "output"  # tiles cover whole tensors and could not be trimmed
        for move in self.tensor.moves(first * before, last * before, order, limit * before // self._widest):
            offset, length, grid = move.target
            if offset % before or length % before:
                raise ValueError("a move cuts an element in two")
            target = Runs(
                offset // before * after,
                length // before * after,
                tuple((count, distance // before * after) for count, distance in grid),
            )
            yield from trim(move._replace(target=target, kernels=self._after(move.kernels)), start, stop)

    @property
    def _caster(self) -> Tiled | None:
        """The tensor whose kernel casts its elements as it makes them, if it can."""
        tensor = self.tensor
        while isinstance(tensor, (View, Tagged)) and tensor.dtype == tensor.tensor.dtype:
            tensor = tensor.tensor
        is_one = isinstance(self.kernel, Cast) and isinstance(tensor, Tiled) and isinstance(tensor.kernel, CASTING)
        return tensor if is_one and isinstance(tensor, Tiled) else None

    @property
    def _widest(self) -> int:
        """The most bytes that an element takes on the way."""
        made = self._caster
        return max(self.dtype.itemsize, made.cast_from if made else self.tensor.dtype.itemsize)

    def _after(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Return `kernels` with this one after them."""
        if isinstance(self.kernel, Cast) and self._caster and kernels and isinstance(kernels[-1], Tile):
            return (*kernels[:-1], kernels[-1]._replace(cast=self.kernel.target))
        return (*kernels, self.kernel)


class Computed(Composed):
    """A tensor computed of several others, tile by tile: a tile needs only parts of them."""

    __slots__ = ()
    # Bytes at a multiple of which each input begins in the source of a tile.
    ALIGNMENT = 1

    @property
    def computed(self) -> bool:
        return True

    def _tiles(self, first: int, last: int, most: int, order: Order) -> Iterator[_TileOf]:
        """Yield tiles of at most `most` elements that cover elements `first` to `last`."""
        raise NotImplementedError

    def _kernel(self, tile: _TileOf, offsets: Sequence[int]) -> Kernel:
        """Return the kernel that makes `tile` of inputs at these `offsets`."""
        raise NotImplementedError

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        item = self.dtype.itemsize
        if start >= stop:
            return
        if stop - start != self.nbytes:
            order = "output"
        for tile in self._tiles(start // item, -(-stop // item), max(limit // self._widest, 1), order):
            moves: list[Move] = []
            offsets = []
            at = 0
            for inner, low, high in tile.inputs:
                at += -at % self.ALIGNMENT
                offsets.append(at)
                made = inner.moves(low, high, "output", limit)
                moves.extend(move._replace(target=move.target.shifted(at - low)) for move in made)
                at += high - low
            whole = Move(tile.target, None, Assembled(tuple(moves), at), (self._kernel(tile, offsets),))
            yield from trim(whole, start, stop)

    @property
    def _widest(self) -> int:
        """The bytes of an element, or those that are read for it if they are more."""
        return self.dtype.itemsize


class _TileOf(NamedTuple):
    """A tile: where it goes, its box (index and number of elements along each dimension), and its inputs, each a tensor
    and the interval of its bytes; the boxes of these, where they matter."""

    target: Runs
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    inputs: Sequence[tuple[LazyTensor, int, int]]
    boxes: Sequence[tuple[LazyTensor, tuple[int, ...], tuple[int, ...]]] = ()


@dataclass(unsafe_hash=True, slots=True)
class Joined(Computed):
    """Tensors of one shape combined by `kernel`, element by element, into elements of `dtype`."""

    parts: tuple[LazyTensor, ...]
    kernel: Kernel
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.parts[0].shape

    @property
    def _widest(self) -> int:
        return max(self.dtype.itemsize, sum(part.dtype.itemsize for part in self.parts))

    def _tiles(self, first: int, last: int, most: int, order: Order) -> Iterator[_TileOf]:
        item = self.dtype.itemsize
        for low in range(first, last, most):
            high = min(low + most, last)
            inputs = [(part, low * part.dtype.itemsize, high * part.dtype.itemsize) for part in self.parts]
            yield _TileOf(Runs(low * item, (high - low) * item), (low,), (high - low,), inputs)

    def _kernel(self, tile: _TileOf, offsets: Sequence[int]) -> Kernel:
        return self.kernel


class Axis(NamedTuple):
    """What a dimension of an input is of a tensor that is computed tile by tile.

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


@dataclass(unsafe_hash=True, slots=True)
class Tiled(Computed):
    """A tensor made by `kernel`, tile by tile: `axes` say for each part, and each of its dimensions, what a tile needs.

    Its first element is the one of index `starts` of the tensor that `axes` are about, which it is a box of. `whole` is
    the tile, at multiples of its sides, of which the kernel needs the inputs of every element; () if each needs its own
    only.
    """

    parts: tuple[LazyTensor, ...]
    axes: tuple[tuple[Axis, ...], ...]
    kernel: Kernel
    dtype: DType
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    whole: tuple[int, ...] = ()

    @property
    def scattered(self) -> bool:
        along = [axis.dim for axis in self.axes[0] if self.shape[axis.dim] > 1]
        # Rows of which several are needed whole are made together.
        deep = any(side > 1 for side, extent in zip(self.whole[:-1], self.shape, strict=False) if extent > 1)
        return along != sorted(along) or deep or self.parts[0].scattered

    @property
    def by_rows(self) -> bool:
        """Whether a tile is made of some rows of codes at a time, so that what is made on the way is small."""
        if not isinstance(self.kernel, Dequantize) or len(self.shape) < 2:
            return False
        return self.kernel.codes == "own" or (self.kernel.codes in ("e2m1", "int4") and self.axes[0][-1].num == 4)

    @property
    def cast_from(self) -> int:
        """The bytes that an element takes where the kernel casts it as it makes it; 0 if only some rows are made at a
        time."""
        if isinstance(self.kernel, LowRank):
            return self.parts[0].dtype.itemsize
        return 0 if self.by_rows else self.dtype.itemsize

    @property
    def grain(self) -> int:
        return self.shape[-1] * self.dtype.itemsize if len(self.shape) > 1 else 0

    @property
    def _widest(self) -> int:
        # A tile needs no more bytes than it makes, but for what a larger one needs whole, and for what is reduced.
        reduced = math.prod(max(-(-axis.num // axis.den), 1) for axis in self.axes[0])
        return max(self.dtype.itemsize, self.parts[0].dtype.itemsize * reduced if self.whole or reduced > 1 else 0)

    def _tiles(self, first: int, last: int, most: int, order: Order) -> Iterator[_TileOf]:
        item, steps = self.dtype.itemsize, contiguous_strides(self.shape)
        most = min(most, self._at_once)
        if isinstance(self.kernel, Dequantize) and not self.by_rows:
            most = min(most, _MOST_DECODED)
        if self.whole:
            for band in bands(self.shape, steps, first, last, max(self.numel, 1), item):
                place = self._place(band.target.offset // item, [count for count, _ in band.dims])
                for target, at, counts in cells(self.shape, place, self.starts, self.whole, most, item):
                    starts = tuple(index + start for index, start in zip(at, self.starts, strict=True))
                    needed = list(self._boxes(starts, counts))
                    yield _TileOf(target, starts, counts, [self._input(*each) for each in needed], needed)
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
            yield _TileOf(box.target, starts, counts, [self._input(*each) for each in needed], needed)

    def _place(self, at: int, inner: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the index of element `at`, and the extent of a box from there on that has `inner` along the last
        dimensions."""
        steps = contiguous_strides(self.shape)
        index = tuple(at // step % extent for step, extent in zip(steps, self.shape, strict=True))
        return index, (1,) * (len(self.shape) - len(inner)) + tuple(inner)

    @property
    def _at_once(self) -> int:
        """The most elements of a tile: of an input, each row or column that it needs may be long."""
        most, columns = _MOST_NEEDED, self.shape[-1] if self.shape else 1
        for part, axes in zip(self.parts, self.axes, strict=True):
            needed = {axis.dim for axis in axes if axis.num}
            each = part.dtype.itemsize * math.prod(
                extent for axis, extent in zip(axes, part.shape, strict=True) if not axis.num
            )
            if len(needed) == 1 and needed != {len(self.shape) - 1}:
                # A tile of whole rows needs it once for each; one of a part of a row, once.
                most = min(most, max(_MOST_NEEDED // max(each, 1), 1) * columns)
            elif needed and each * columns > _MOST_NEEDED:
                most = min(most, max(_MOST_NEEDED // each, 1))
        return most

    def _source_strides(self) -> tuple[int, ...]:
        """Return strides that order the dimensions as the codes have them."""
        order = [axis.dim for axis in self.axes[0]]
        order = [*(dim for dim in range(len(self.shape)) if dim not in order), *order]
        found = dict(zip(order, contiguous_strides([self.shape[dim] for dim in order]), strict=True))
        return tuple(found[dim] for dim in range(len(self.shape)))

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
        """Return the box of `part` as a tensor and an interval of it."""
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

    def _kernel(self, tile: _TileOf, offsets: Sequence[int]) -> Kernel:
        found = zip(offsets, tile.boxes, self.axes, strict=True)
        boxes = (Box(at, part.dtype.name, starts, counts, axes) for at, (part, starts, counts), axes in found)
        return Tile(self.kernel, tile.starts, tile.counts, tuple(boxes))

    ALIGNMENT = 16


@dataclass(unsafe_hash=True, slots=True)
class Inline(Virtual):
    """A tensor whose bytes are held in the expression itself."""

    data: bytes
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.nbytes != len(self.data):
            raise ValueError(f"{len(self.data)} bytes are not a tensor of {self.dtype} {self.shape}")

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        for at in range(start, stop, limit):
            end = min(at + limit, stop)
            yield Move(Runs(at, end - at), None, self.data[at:end])


@dataclass(unsafe_hash=True, slots=True)
class Zeros(Virtual):
    """A tensor of zeros, which is stored nowhere."""

    dtype: DType
    shape: tuple[int, ...]

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        for at in range(start, stop, limit):
            length = min(limit, stop - at)
            yield Move(Runs(at, length), None, bytes(length))


class TensorFacts(NamedTuple):
    """The facts about a tensor in a state dict other than its bytes.

    `kind` is "tensor", "parameter", "buffer" or the name of a subclass. Tensors with the same `storage` shared memory
    when they were saved. Each saw a storage of `storage_nbytes` bytes and began at its element `storage_offset`, with
    `strides` (elements).
    """

    kind: str = "tensor"
    requires_grad: bool = False
    attributes: Any = None
    storage: Hashable = None
    storage_nbytes: int = 0
    storage_offset: int = 0
    strides: tuple[int, ...] = ()


@dataclass(unsafe_hash=True, slots=True)
class Tagged(Derived):
    """A leaf of a state dict: `tensor`, and the facts about it that its bytes do not tell."""

    tensor: LazyTensor
    facts: TensorFacts

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.tensor.shape

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        return self.tensor.moves(start, stop, order, limit)


def _makes_boxes(tensor: LazyTensor) -> bool:
    """Whether the moves of `tensor` in source order are boxes of its own dimensions, as those of a wider tensor are."""
    if isinstance(tensor, (Tagged, Convert)):
        return _makes_boxes(tensor.tensor)
    return all(map(_makes_boxes, tensor.parts)) if isinstance(tensor, Concat) else isinstance(tensor, Stored)


def _density(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> float:
    """Return the bytes from the first to the last of the elements that have small gaps between them, by their own."""
    run, count = item, 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1:
            if stride * item - run > GAP:
                break
            run += (length - 1) * stride * item
            count *= length
    return run / (count * item)


class Handle:
    """What stands for an expression, with open files beside it. Only the expression goes into a file."""

    __slots__ = ()

    @property
    def lazy(self) -> LazyTensor:
        """The expression that says where its bytes are."""
        raise NotImplementedError


def untagged(tensor: LazyTensor) -> LazyTensor:
    """Return the expression without its facts."""
    return tensor.tensor if isinstance(tensor, Tagged) else tensor


# The facts of a tensor of which none are known.
NO_FACTS = TensorFacts()


def facts_of(tensor: LazyTensor) -> TensorFacts:
    """Return the facts that are known of a tensor."""
    return tensor.facts if isinstance(tensor, Tagged) else NO_FACTS


def packed(tensors: Iterable[LazyTensor]) -> Counter[File]:
    """Return the compressed files that `tensors` are read from, with the bytes of tensors that come from each."""
    found: Counter[File] = Counter()
    for tensor in tensors:
        files = tensor.inputs()
        if files and (files[0].packed or len(files) > 1):  # seldom
            found.update({file: tensor.nbytes for file in files if file.packed})
    return found


def same_bytes(tensor: LazyTensor) -> Hashable:
    """Return a key that is equal for two tensors with the same elements in the same place, dtype and shape.

    Return None for an empty tensor, which never equals another. Expressions over several files compare by identity: to
    tie names, use one object for all of them.
    """
    tensor = inner = untagged(tensor)
    if tensor.numel == 0:
        return None
    while isinstance(inner, (Convert, View)):
        inner = inner.tensor
    return tensor if isinstance(inner, Stored) else id(tensor)


class StridedRows(NamedTuple):
    """Where a tensor is that takes the same bytes from each of several consecutive rows of equal length.

    `rows` are (file, number of rows, bytes from one to the next), one for each part of a joined tensor. `offsets` are
    the first byte of each part. Tensors with the same `rows` may share them.
    """

    rows: tuple[tuple[File, int, int], ...]
    offsets: tuple[int, ...]

    def beside(self, other: StridedRows) -> bool:
        """Whether both are in the same rows, this one not before the other."""
        return self.rows == other.rows and all(
            0 <= mine - theirs < distance
            for mine, theirs, (_, _, distance) in zip(self.offsets, other.offsets, self.rows, strict=True)
        )


def strided_rows(tensor: LazyTensor) -> StridedRows | None:
    """Return the strided rows of `tensor`, one index of its first dimension to a row.

    Return None for a tensor that is dense or in another order.
    """
    if isinstance(tensor, Tagged):
        return strided_rows(tensor.tensor)
    if isinstance(tensor, (View, Convert)):
        return strided_rows(tensor.tensor) if tensor.shape[:1] == tensor.tensor.shape[:1] else None
    if isinstance(tensor, Concat):
        parts = [found for part in tensor.parts if (found := strided_rows(part)) is not None]
        if not parts or len(parts) < len(tensor.parts):
            return None
        if tensor.dim:
            first = min(parts, key=lambda part: part.offsets)
            return first if all(part.beside(first) for part in parts) else None
        rows, offsets = ([*itertools.chain(*each)] for each in zip(*parts, strict=True))
        return StridedRows(tuple(rows), tuple(offsets))
    if not isinstance(tensor, Stored) or not tensor.shape or not tensor.numel:
        return None
    item = tensor.dtype.itemsize
    distance = tensor.strides[0] * item
    width = item + sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.strides[1:], strict=True)) * item
    if width >= distance:
        return None
    return StridedRows(((tensor.file, tensor.shape[0], distance),), (tensor.offset,))
