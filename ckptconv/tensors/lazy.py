"""`LazyTensor` expressions: the places of a tensor's bytes, and the `Move`s that produce them.

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
from collections.abc import Hashable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.moves import BLOCK, GAP, Assembled, Cast, Cut, File, Kernel, Move, Order, Runs
from ckptconv.tensors.strides import is_contiguous

if TYPE_CHECKING:
    from typing_extensions import Self

# Bytes of one move of a `Picked` tensor, which may consist of as many runs as elements; and runs, if those are longer.
_PICKED_AT_ONCE, _RUNS_AT_ONCE = 1 << 16, 512
_INNER = File("", 0)
# A name, and two tensors found under it of which one is kept: their bytes have to be equal.
Equal: TypeAlias = "tuple[str, LazyTensor, LazyTensor]"


# ------------------------------------------------------------------------------------------------------ LazyTensor


class LazyTensor:
    """A tensor that is not loaded: `dtype`, `shape`, and where its bytes are. The base class of all expressions.

    Expressions are never changed: they are shared, and keys of dicts. There may be a million; frozen dataclasses would
    take four times as long to make, and delay every start of a program.
    """

    __slots__ = ()
    # Names of its fields: the arguments of its class, by default its slots. With equal fields, expressions are equal.
    fields: ClassVar[tuple[str, ...]]
    _values: ClassVar[attrgetter[Any]]
    dtype: DType
    shape: tuple[int, ...]

    def __init_subclass__(cls) -> None:
        cls.fields = vars(cls).get("fields", cls.__slots__)
        if cls.fields:
            cls._values = attrgetter(*cls.fields)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(self._values(self) == self._values(other))

    def __hash__(self) -> int:
        return hash(self._values(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}({shown})"

    def replaced(self, **fields: Any) -> Self:
        """Return the same expression with these `fields` in the place of its own."""
        return type(self)(**{**{name: getattr(self, name) for name in self.fields}, **fields})

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
        """Whether each element is computed from several, which takes longer than a move or a cast."""
        return False

    @property
    def grain(self) -> int:
        """The bytes of a row of a tensor computed by rows: cuts within a row make more tiles. 0: it may be cut
        anywhere."""
        return 0

    @property
    def cast_from(self) -> int | None:
        """The bytes of an element before its kernel casts it; 0 if only some rows are computed at once, None without a
        cast."""
        return None

    def inputs(self) -> tuple[File, ...]:
        """Return the files that its bytes come from; a file may occur more than once."""
        raise NotImplementedError

    def origin(self) -> tuple[str, int]:
        """Return the path and offset of its first byte: tensors sorted by this are read forwards."""
        raise NotImplementedError

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        """Yield the moves that make bytes `start` to `stop`; their targets count from the first byte of the tensor.

        Together the targets cover the interval once. In "source" order, the moves of a whole tensor come in file order,
        with targets in any order. No move makes more than `limit` bytes. None reads more than about twice that; in
        "source" order, none reads more than `limit`.
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


class Stored(LazyTensor):
    """Elements in a file from byte `offset`, laid out by `strides` (in elements; stride 0 repeats an element)."""

    __slots__ = ("dtype", "file", "offset", "shape", "strides")

    def __init__(self, file: File, offset: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.file = file
        self.offset = offset
        self.dtype = dtype
        self.shape = shape
        self.strides = strides

    def __hash__(self) -> int:  # quicker than that of the others: most tensors of a checkpoint are keys
        return hash((self.file, self.offset, self.dtype, self.shape, self.strides))

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
        from ckptconv.tensors.geometry import bands, boxes_of, gather, tiles, trim

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


class Partitioned(LazyTensor):
    """A parameter cut into equal pieces, one on every rank (ZeRO-3), joined in rank order.

    Rank r holds `piece` elements from byte `bases[r] + offset` of `files[r]`. All pieces together may be longer than
    the tensor; the rest is padding. All parameters of a flat group share the tuples `files` and `bases`.
    """

    __slots__ = ("bases", "dtype", "files", "offset", "piece", "shape")

    def __init__(
        self,
        files: tuple[File, ...],
        bases: tuple[int, ...],
        offset: int,
        piece: int,
        dtype: DType,
        shape: tuple[int, ...],
    ) -> None:
        self.files = files
        self.bases = bases
        self.offset = offset
        self.piece = piece
        self.dtype = dtype
        self.shape = shape

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


class Concat(Composed):
    """Tensors of one dtype joined along `dim`; their other dimensions are equal."""

    __slots__ = ("dim", "dtype", "parts", "shape", "starts")
    fields = ("parts", "dim")

    def __init__(self, parts: tuple[LazyTensor, ...], dim: int = 0) -> None:
        first = parts[0]
        for part in parts:
            if part.dtype != first.dtype or part.shape[:dim] + part.shape[dim + 1 :] != (
                first.shape[:dim] + first.shape[dim + 1 :]
            ):
                raise ValueError(f"cannot join {part.dtype} {part.shape} to {first.dtype} {first.shape} along {dim}")
        extent = sum(part.shape[dim] for part in parts)
        unit = math.prod(first.shape[dim + 1 :]) * first.dtype.itemsize
        self.parts = parts
        self.dim = dim
        self.dtype = first.dtype
        self.shape = (*first.shape[:dim], extent, *first.shape[dim + 1 :])
        # Where each part begins inside a row (bytes); a row is the span of one index of the dimensions before `dim`.
        self.starts = tuple(itertools.accumulate((part.shape[dim] * unit for part in parts), initial=0))

    @property
    def scattered(self) -> bool:
        return any(part.scattered for part in self.parts)

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        from ckptconv.tensors.geometry import row_runs, spread

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


class Narrow(Derived):
    """`length` indices of `tensor` along `dim`, from `start`."""

    __slots__ = ("dim", "length", "start", "tensor")

    def __init__(self, tensor: LazyTensor, dim: int, start: int, length: int) -> None:
        self.tensor = tensor
        self.dim = dim
        self.start = start
        self.length = length
        extent = tensor.shape[dim]
        if not 0 <= start <= start + length <= extent:
            raise ValueError(f"[{start}, {start + length}) is outside a dimension of {extent}")

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


class View(Derived):
    """The same bytes with another dtype or shape."""

    __slots__ = ("dtype", "shape", "tensor")

    def __init__(self, tensor: LazyTensor, dtype: DType, shape: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.dtype = dtype
        self.shape = shape
        if self.nbytes != tensor.nbytes:
            raise ValueError(f"{tensor.nbytes} bytes cannot be viewed as {dtype} {shape}")

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        return self.tensor.moves(start, stop, order, limit)


class Picked(Derived):
    """Elements of `tensor`: from element `start` of its C order on, by `strides` (in elements)."""

    __slots__ = ("shape", "start", "strides", "tensor")

    def __init__(self, tensor: LazyTensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.start = start
        self.shape = shape
        self.strides = strides

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.tensor.dtype

    @property
    def scattered(self) -> bool:
        return False

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        if start >= stop:
            return
        from ckptconv.tensors.geometry import bands, gather, trim

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


class Convert(Derived):
    """`tensor` with every element converted by `kernel` to an element of `dtype`."""

    __slots__ = ("dtype", "kernel", "tensor")

    def __init__(self, tensor: LazyTensor, kernel: Kernel, dtype: DType) -> None:
        self.tensor = tensor
        self.kernel = kernel
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.tensor.shape

    @property
    def grain(self) -> int:
        return self.tensor.grain * self.dtype.itemsize // self.tensor.dtype.itemsize

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        from ckptconv.tensors.geometry import trim

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
    def _cast_from(self) -> int | None:
        """The `cast_from` of the innermost tensor, whose kernel then casts its elements for this cast too."""
        tensor = self.tensor
        while isinstance(tensor, (View, Tagged)) and tensor.dtype == tensor.tensor.dtype:
            tensor = tensor.tensor
        return tensor.cast_from if isinstance(self.kernel, Cast) else None

    @property
    def _widest(self) -> int:
        """The most bytes that an element takes during its conversion."""
        source = self._cast_from
        return max(self.dtype.itemsize, self.tensor.dtype.itemsize if source is None else source)

    def _after(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Return `kernels` with this one after them."""
        tile: Any = kernels[-1] if kernels and not isinstance(kernels[-1], Cut) else None
        if tile and isinstance(self.kernel, Cast) and self._cast_from is not None:
            return (*kernels[:-1], tile._replace(cast=self.kernel.target))
        return (*kernels, self.kernel)


class Inline(Virtual):
    """A tensor whose bytes are held in the expression itself."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data: bytes, dtype: DType, shape: tuple[int, ...]) -> None:
        self.data = data
        self.dtype = dtype
        self.shape = shape
        if self.nbytes != len(data):
            raise ValueError(f"{len(data)} bytes are not a tensor of {dtype} {shape}")

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        for at in range(start, stop, limit):
            end = min(at + limit, stop)
            yield Move(Runs(at, end - at), None, self.data[at:end])


class Zeros(Virtual):
    """A tensor of zeros, which is stored nowhere."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: DType, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

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


class Tagged(Derived):
    """A leaf of a state dict: `tensor`, and the facts about it that its bytes do not show."""

    __slots__ = ("facts", "tensor")

    def __init__(self, tensor: LazyTensor, facts: TensorFacts) -> None:
        self.tensor = tensor
        self.facts = facts

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.tensor.shape

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        return self.tensor.moves(start, stop, order, limit)


def _makes_boxes(tensor: LazyTensor) -> bool:
    """Return whether the source-order moves of `tensor` are boxes of its own dimensions, as a wider tensor's are."""
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
    """A placeholder of an expression, together with open files. Only the expression goes into a file."""

    __slots__ = ()

    @property
    def lazy(self) -> LazyTensor:
        """The expression that gives the place of its bytes."""
        raise NotImplementedError


def untagged(tensor: LazyTensor) -> LazyTensor:
    """Return the expression without its facts."""
    return tensor.tensor if isinstance(tensor, Tagged) else tensor


# The facts of a tensor without known facts.
NO_FACTS = TensorFacts()


def facts_of(tensor: LazyTensor) -> TensorFacts:
    """Return the known facts about a tensor."""
    return tensor.facts if isinstance(tensor, Tagged) else NO_FACTS


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
