"""Where the bytes of a tensor lie: dtypes, `LazyTensor` expressions, and the `Move`s that carry them out.

A `LazyTensor` is a dtype, a shape and an expression over byte ranges of files. It holds no data and opens nothing; it
answers one question: which source bytes make up bytes `start` to `stop` of this tensor (C order, little-endian)?
The answer is a stream of `Move`s, each no larger than one buffer. Everything else, threads, resume, remote reads,
joining of partitions, follows from that question being answerable for any interval, at any time, in any process.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

# The largest piece of work: buffers of 256 KiB to 1 MiB stay in the second-level cache and copy fastest.
BLOCK = 1 << 20
# Bytes between two runs that are cheaper to read along than to skip with one more system call.
GAP = 2048

Order: TypeAlias = Literal["output", "source"]


# ---------------------------------------------------------------------------------------------------------- dtypes


class DType(NamedTuple):
    """An element type: torch's name, safetensors' code (None where it has none), bytes per element, and kind.

    Kinds: f float, i signed, u unsigned, b bool, c complex, x other bits (quantized, packed).
    """

    name: str
    code: str | None
    itemsize: int
    kind: str

    def __str__(self) -> str:
        return self.name


# In the order in which safetensors ranks its codes: the library writes the last first.
_DTYPES = (
    DType("bool", "BOOL", 1, "b"),
    DType("float4_e2m1fn_x2", "F4", 1, "x"),  # two values a byte; safetensors counts values, torch bytes
    DType("uint8", "U8", 1, "u"),
    DType("int8", "I8", 1, "i"),
    DType("float8_e5m2", "F8_E5M2", 1, "f"),
    DType("float8_e4m3fn", "F8_E4M3", 1, "f"),
    DType("float8_e8m0fnu", "F8_E8M0", 1, "x"),  # powers of two that scale a block; no numbers of their own
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 1, "f"),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 1, "f"),
    DType("int16", "I16", 2, "i"),
    DType("uint16", "U16", 2, "u"),
    DType("float16", "F16", 2, "f"),
    DType("bfloat16", "BF16", 2, "f"),
    DType("int32", "I32", 4, "i"),
    DType("uint32", "U32", 4, "u"),
    DType("float32", "F32", 4, "f"),
    DType("complex64", "C64", 8, "c"),
    DType("float64", "F64", 8, "f"),
    DType("int64", "I64", 8, "i"),
    DType("uint64", "U64", 8, "u"),
    DType("complex32", None, 4, "c"),
    DType("complex128", None, 16, "c"),
    DType("bits8", None, 1, "x"),
    DType("bits16", None, 2, "x"),
    DType("bits1x8", None, 1, "x"),
    DType("bits2x4", None, 1, "x"),
    DType("bits4x2", None, 1, "x"),
    DType("qint8", None, 1, "x"),
    DType("quint8", None, 1, "x"),
    DType("qint32", None, 4, "x"),
    DType("quint4x2", None, 1, "x"),
    DType("quint2x4", None, 1, "x"),
)
DTYPES: dict[str, DType] = {d.name: d for d in _DTYPES}
DTYPES_BY_CODE: dict[str, DType] = {d.code: d for d in _DTYPES if d.code}
DTYPE_RANK: dict[str, int] = {d.name: rank for rank, d in enumerate(_DTYPES)}


def itemsize_of_components(dtype: DType) -> int:
    """Bytes of the unit whose order is swapped in a big-endian file: a complex number is two of them."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


# ------------------------------------------------------------------------------------------------- files and moves


class File(NamedTuple):
    """A file as a source of bytes: its URL or path, its size, and what identifies this version of its content.

    It may be compressed inside another: `packed` says where, and `path` is for people only.
    """

    path: str
    size: int
    stamp: str = ""
    packed: Packed | None = None

    @property
    def stored(self) -> File:
        """The file as it is stored: itself, or the one that it is packed in."""
        return self.packed.file if self.packed else self


class Packed(NamedTuple):
    """`nbytes` bytes from byte `offset` of `file`, compressed by `method`, "deflate" or "zstandard"; the CRC-32 of what
    they unpack to, if it is recorded."""

    file: File
    offset: int
    nbytes: int
    crc: int | None
    method: str = "deflate"


class Runs(NamedTuple):
    """Equal runs at regular distances: `length` bytes at `offset`, repeated over `grid`.

    `grid` is a tuple of (count, distance in bytes), outermost first; empty for a single run.
    """

    offset: int
    length: int
    grid: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.length * math.prod(count for count, _ in self.grid) if self.grid else self.length

    @property
    def stop(self) -> int:
        """Where the last run ends; distances are never negative."""
        return self.offset + self.length + sum((count - 1) * distance for count, distance in self.grid)

    def offsets(self) -> Iterator[int]:
        """Where each run begins, in the order in which they are packed."""
        if not self.grid:
            yield self.offset
        elif len(self.grid) == 1:
            count, distance = self.grid[0]
            yield from (
                range(self.offset, self.offset + count * distance, distance)
                if distance
                else itertools.repeat(self.offset, count)
            )
        else:
            steps = [[index * distance for index in range(count)] for count, distance in self.grid]
            for combination in itertools.product(*steps):
                yield self.offset + sum(combination)

    def shifted(self, distance: int) -> Runs:
        return Runs(self.offset + distance, self.length, self.grid)


class Gather(NamedTuple):
    """Pick elements of `itemsize` bytes by strides (in bytes) out of the packed source, into C order."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Cast(NamedTuple):
    """Convert elements from one dtype to another, one correct rounding each."""

    source: str
    target: str


class Swap(NamedTuple):
    """Reverse the bytes of every unit of `itemsize` bytes: big-endian to little-endian."""

    itemsize: int


class Negate(NamedTuple):
    """Flip every element's sign: torch's neg bit, resolved."""

    dtype: str


class Conjugate(NamedTuple):
    """Flip the sign of every imaginary part: torch's conj bit, resolved."""

    dtype: str


class Cut(NamedTuple):
    """Keep bytes `start` to `stop` of what the kernels before have made."""

    start: int
    stop: int


class Bits(NamedTuple):
    """Of every unsigned integer of `itemsize` bytes keep `width` bits from bit `shift` on, as one of `result` bytes."""

    itemsize: int
    shift: int
    width: int
    result: int


class Join(NamedTuple):
    """Of as many unsigned integers of each of several kinds, kind after kind, make integers of `result` bytes.

    `kinds` are (bytes of one, the bit it begins at in the result, how many bits it has there).
    """

    kinds: tuple[tuple[int, int, int], ...]
    result: int


Kernel: TypeAlias = Gather | Cast | Swap | Negate | Conjugate | Bits | Join | Cut


class Together(NamedTuple):
    """What several moves make, in `nbytes` bytes in which their targets lie."""

    moves: tuple[Move, ...]
    nbytes: int


class Move(NamedTuple):
    """A piece of work no larger than one buffer.

    Read `source` from `file` (or take the bytes themselves, or what other moves make, when `file` is None), packed run
    after run; apply `kernels` in turn; put the result at `target` of the tensor, run after run.
    """

    target: Runs
    file: File | None
    source: Runs | bytes | Together
    kernels: tuple[Kernel, ...] = ()


# ------------------------------------------------------------------------------------------------------ LazyTensor


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a C-order tensor of `shape`, in elements, as torch counts them."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


# Tensors are many, and their shapes are few.
@functools.lru_cache(maxsize=4096)
def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of `shape` laid out by `strides` (in elements) lie densely in C order."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1:
            if stride != step:
                return False
            step *= extent
    return True


class LazyTensor:
    """A tensor that is not loaded: `dtype`, `shape`, and where its bytes are. The base of all expressions."""

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
        """Whether output order costs far more reads than source order, as for a transposed matrix."""
        return False

    def inputs(self) -> tuple[File, ...]:
        """The files its bytes come from; one may come more than once."""
        raise NotImplementedError

    def origin(self) -> tuple[str, int]:
        """The path and offset its first byte comes from: sorted by this, files are read forwards."""
        raise NotImplementedError

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        """The moves that make up bytes `start` to `stop`; their targets count from the tensor's first byte.

        Together the targets cover the interval once. In "source" order a whole tensor's moves come as they lie in the
        file, wherever they go. No move makes more than `limit` bytes, or reads more than about twice that; in "source"
        order not more than that.
        """
        raise NotImplementedError


class Derived(LazyTensor):
    """A tensor that is made of one other."""

    __slots__ = ()
    tensor: LazyTensor

    @property
    def scattered(self) -> bool:
        return self.tensor.scattered

    def inputs(self) -> tuple[File, ...]:
        return self.tensor.inputs()

    def origin(self) -> tuple[str, int]:
        return self.tensor.origin()


class Composed(LazyTensor):
    """A tensor that is made of several others."""

    __slots__ = ()
    parts: tuple[LazyTensor, ...]

    def inputs(self) -> tuple[File, ...]:
        return tuple(itertools.chain.from_iterable(part.inputs() for part in self.parts))

    def origin(self) -> tuple[str, int]:
        return self.parts[0].origin()


class Unstored(LazyTensor):
    """A tensor that is in no file."""

    __slots__ = ()

    def inputs(self) -> tuple[File, ...]:
        return ()

    def origin(self) -> tuple[str, int]:
        return "", 0


@dataclass(frozen=True, slots=True)
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
        # How many bytes lie together in the file and in the result alike? Where they are few, order matters.
        run = item = self.dtype.itemsize
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent > 1:
                if stride * item > run + GAP:
                    return run < 2 * GAP
                run = max(run, extent * stride * item)
        return False

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
            boxes = _tiles(self.shape, self.strides, limit // item, item)
        else:
            boxes = _bands(self.shape, self.strides, start // item, -(-stop // item), limit // item, item)
        for box in boxes:
            most = 2 * limit if order == "output" else limit
            yield from _trim(_gather(self.file, self.offset, box, item, most), start, stop)


@dataclass(frozen=True, slots=True)
class Partitioned(LazyTensor):
    """A parameter cut into equal pieces, one on every rank (ZeRO-3), joined in rank order.

    Rank r holds `piece` elements from byte `bases[r] + offset` of `files[r]`. The pieces together may be longer than
    the tensor: what is left over is padding. `files` and `bases` are tuples that all parameters of a flat group share.
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


@dataclass(frozen=True, slots=True)
class Concat(Composed):
    """Tensors of one dtype joined along `dim`; their other dimensions are equal."""

    parts: tuple[LazyTensor, ...]
    dim: int = 0
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    # Where each part begins inside a row, a row being what one index of the dimensions before `dim` spans, in bytes.
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
        object.__setattr__(self, "dtype", first.dtype)
        object.__setattr__(self, "shape", (*first.shape[:dim], extent, *first.shape[dim + 1 :]))
        object.__setattr__(self, "starts", tuple(starts))

    @property
    def scattered(self) -> bool:
        return any(part.scattered for part in self.parts)

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        row = self.starts[-1]
        for first, last, low, high in _rows(start, stop, row, limit):
            index = bisect.bisect_right(self.starts, low) - 1
            while index < len(self.parts) and self.starts[index] < high:
                begin, width = self.starts[index], self.starts[index + 1] - self.starts[index]
                part_low, part_high = max(low - begin, 0), min(high - begin, width)
                if part_low < part_high:
                    # Full rows are one interval of the part; a partial row is always alone.
                    inner = self.parts[index].moves(
                        first * width + part_low, (last - 1) * width + part_high, order, limit
                    )
                    for move in inner:
                        yield from _spread(move, width, row, begin)
                index += 1


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class View(Derived):
    """The same bytes under another dtype or shape."""

    tensor: LazyTensor
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.nbytes != self.tensor.nbytes:
            raise ValueError(f"{self.tensor.nbytes} bytes cannot be seen as {self.dtype} {self.shape}")

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        return self.tensor.moves(start, stop, order, limit)


@dataclass(frozen=True, slots=True)
class Convert(Derived):
    """`tensor` with every element passed through `kernel`, giving elements of `dtype`."""

    tensor: LazyTensor
    kernel: Cast | Swap | Negate | Conjugate | Bits
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.tensor.shape

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        before, after = self.tensor.dtype.itemsize, self.dtype.itemsize
        first, last = start // after, -(-stop // after)
        if stop - start != self.nbytes:
            order = "output"  # tiles are of whole tensors, and could not be trimmed
        for move in self.tensor.moves(first * before, last * before, order, limit * before // max(before, after)):
            offset, length, grid = move.target
            if offset % before or length % before:
                raise ValueError("a move cuts an element in two")
            target = Runs(
                offset // before * after,
                length // before * after,
                tuple((count, distance // before * after) for count, distance in grid),
            )
            yield from _trim(move._replace(target=target, kernels=(*move.kernels, self.kernel)), start, stop)


@dataclass(frozen=True, slots=True)
class Joined(Composed):
    """Tensors of one shape put together by `kernel`, element by element, into elements of `dtype`."""

    parts: tuple[LazyTensor, ...]
    kernel: Join
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.parts[0].shape

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        after = self.dtype.itemsize
        step = max(limit // max(after, sum(size for size, _, _ in self.kernel.kinds)), 1)
        last = -(-stop // after)
        for low in range(start // after, last, step):
            count = min(step, last - low)
            moves: list[Move] = []
            at = 0
            for part, (size, _, _) in zip(self.parts, self.kernel.kinds, strict=True):
                inner = part.moves(low * size, (low + count) * size, "output", limit)
                moves.extend(move._replace(target=move.target.shifted(at - low * size)) for move in inner)
                at += count * size
            whole = Move(Runs(low * after, count * after), None, Together(tuple(moves), at), (self.kernel,))
            yield from _trim(whole, start, stop)


@dataclass(frozen=True, slots=True)
class Inline(Unstored):
    """A tensor whose bytes are in the description itself."""

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


@dataclass(frozen=True, slots=True)
class Zeros(Unstored):
    """A tensor of zeros, which is nowhere stored."""

    dtype: DType
    shape: tuple[int, ...]

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        for at in range(start, stop, limit):
            length = min(limit, stop - at)
            yield Move(Runs(at, length), None, bytes(length))


class TensorFacts(NamedTuple):
    """What a tensor in a state dict is beside its bytes.

    `kind` is "tensor", "parameter", "buffer" or the name of a subclass. Tensors with the same `storage` shared memory
    when they were saved: each saw `storage_nbytes` bytes from element `storage_offset` on, by `strides` (elements).
    """

    kind: str = "tensor"
    requires_grad: bool = False
    attributes: Any = None
    storage: Hashable = None
    storage_nbytes: int = 0
    storage_offset: int = 0
    strides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
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


def untagged(tensor: LazyTensor) -> LazyTensor:
    """The expression alone."""
    return tensor.tensor if isinstance(tensor, Tagged) else tensor


def same_bytes(tensor: LazyTensor) -> Hashable:
    """A key that two tensors have in common when they are the same elements in the same place, dtype and shape.

    None for an empty tensor, which is never the same as another. Expressions over several files compare by identity:
    whoever builds them ties names by using one object.
    """
    tensor = inner = untagged(tensor)
    if tensor.numel == 0:
        return None
    while isinstance(inner, (Convert, View)):
        inner = inner.tensor
    return tensor if isinstance(inner, Stored) else id(tensor)


class Lane(NamedTuple):
    """Where a tensor lies that takes the same bytes out of each of equal rows, which lie one after the other.

    `rows` are (file, number of rows, bytes from one to the next), part after part where the tensor is joined of
    several; `offsets` says where each part has its first byte. Tensors with the same `rows` may share them.
    """

    rows: tuple[tuple[File, int, int], ...]
    offsets: tuple[int, ...]

    def beside(self, other: Lane) -> bool:
        """Whether the two lie in the same rows, this one not before the other."""
        return self.rows == other.rows and all(
            0 <= mine - theirs < distance
            for mine, theirs, (_, _, distance) in zip(self.offsets, other.offsets, self.rows, strict=True)
        )


def lane(tensor: LazyTensor) -> Lane | None:
    """The lane that `tensor` is, one index of its first dimension to a row; None for what is none, as it lies densely
    or in another order."""
    if isinstance(tensor, Tagged):
        return lane(tensor.tensor)
    if isinstance(tensor, (View, Convert)):
        return lane(tensor.tensor) if tensor.shape[:1] == tensor.tensor.shape[:1] else None
    if isinstance(tensor, Concat):
        parts = [found for part in tensor.parts if (found := lane(part)) is not None]
        if not parts or len(parts) < len(tensor.parts):
            return None
        if tensor.dim:
            first = min(parts, key=lambda part: part.offsets)
            return first if all(part.beside(first) for part in parts) else None
        rows, offsets = ([*itertools.chain(*each)] for each in zip(*parts, strict=True))
        return Lane(tuple(rows), tuple(offsets))
    if not isinstance(tensor, Stored) or not tensor.shape or not tensor.numel:
        return None
    item = tensor.dtype.itemsize
    distance = tensor.strides[0] * item
    width = item + sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.strides[1:], strict=True)) * item
    if width >= distance:
        return None
    return Lane(((tensor.file, tensor.shape[0], distance),), (tensor.offset,))


# ------------------------------------------------------------------------------------------------------- geometry


class _Box(NamedTuple):
    """A block of a strided tensor: where its elements go (bytes), where they begin (elements), and by dimension how
    many they are and how far apart (elements), in C order."""

    target: Runs
    origin: int
    dims: tuple[tuple[int, int], ...]


def _bands(
    shape: tuple[int, ...], strides: tuple[int, ...], first: int, last: int, limit: int, item: int
) -> Iterator[_Box]:
    """Boxes of at most `limit` elements whose results are contiguous, in output order, for elements `first` to
    `last`."""
    sizes = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def walk(dim: int, low: int, high: int, origin: int, done: int) -> Iterator[_Box]:
        """Elements `low` to `high` of the sub-tensor of dimensions from `dim` on, whose first goes to `done`."""
        if dim == len(shape):
            yield _Box(Runs(done * item, item), origin, ())
            return
        size, stride = sizes[dim], strides[dim]
        index, rest = divmod(low, size)
        if rest:
            end = min(size, high - index * size)
            yield from walk(dim + 1, rest, end, origin + index * stride, done + index * size)
            index += 1
        stop, rest = divmod(high, size)
        rows = limit // size
        while index < stop and rows:
            count = min(rows, stop - index)
            dims = ((count, stride), *zip(shape[dim + 1 :], strides[dim + 1 :], strict=True))
            target = Runs((done + index * size) * item, count * size * item)
            yield _Box(target, origin + index * stride, dims)
            index += count
        while index < stop:
            yield from walk(dim + 1, 0, size, origin + index * stride, done + index * size)
            index += 1
        if index == stop and rest:
            yield from walk(dim + 1, 0, rest, origin + stop * stride, done + stop * size)

    return walk(0, first, last, 0, 0)


def _tiles(shape: tuple[int, ...], strides: tuple[int, ...], limit: int, item: int) -> Iterator[_Box]:
    """Boxes of at most `limit` elements that are long runs in the file and in the result alike, in file order."""
    # Runs that begin and end with pages cost less than others.
    limit = 1 << limit.bit_length() - 1
    by_source = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: strides[dim])
    by_result = [dim for dim in reversed(range(len(shape))) if shape[dim] > 1]
    tile = [1] * len(shape)

    def grow(dims: list[int], factor: int) -> None:
        for dim in dims:
            if factor < 2 or tile[dim] * factor < shape[dim]:
                tile[dim] = max(tile[dim] * factor, 1)
                return
            factor = factor * tile[dim] // shape[dim]
            tile[dim] = shape[dim]

    # The runs that are written are the longer ones: a page that is written in pieces costs more than one that is read.
    grow(by_source, 1 << max(limit.bit_length() // 2 - 1, 0))
    grow(by_result, limit // math.prod(tile))
    grow(by_source, limit // math.prod(tile))

    results = contiguous_strides(shape)
    outer = list(reversed(by_source))
    for corner in itertools.product(*(range(0, shape[dim], tile[dim]) for dim in outer)):
        starts = dict(zip(outer, corner, strict=True))
        counts = [min(tile[dim], shape[dim] - starts.get(dim, 0)) for dim in range(len(shape))]
        at = sum(start * results[dim] for dim, start in starts.items())
        run = 1
        grid: list[tuple[int, int]] = []
        for dim in by_result:
            if counts[dim] > 1:
                if not grid and results[dim] == run:
                    run *= counts[dim]
                else:
                    grid.append((counts[dim], results[dim] * item))
        yield _Box(
            Runs(at * item, run * item, tuple(reversed(grid))),
            sum(start * strides[dim] for dim, start in starts.items()),
            tuple(zip(counts, strides, strict=True)),
        )


def _gather(file: File, base: int, box: _Box, item: int, most: int) -> Move:
    """The move that makes `box`: which runs to read, of `most` bytes if there are gaps in them, and how to pick the
    elements out of them."""
    dims = [(count, stride * item) for count, stride in box.dims]
    axes = sorted((axis for axis, (count, stride) in enumerate(dims) if count > 1 and stride), key=lambda a: dims[a][1])
    for gap in (GAP, 0):
        run = item
        grid: list[int] = []
        packed: dict[int, int] = {}
        for axis in axes:
            count, stride = dims[axis]
            if not grid and stride - run <= gap:
                packed[axis] = stride
                run += (count - 1) * stride
            else:
                grid.append(axis)
        step = run
        for axis in grid:
            packed[axis] = step
            step *= dims[axis][0]
        # Reading along the gaps pays only while the buffer stays small.
        if step <= most:
            break
    source = Runs(base + box.origin * item, run, tuple(dims[axis] for axis in reversed(grid)))
    shape = tuple(count for count, _ in dims)
    picked = tuple(packed.get(axis, 0) for axis in range(len(dims)))
    if step == box.target.nbytes and is_contiguous(shape, tuple(stride // item for stride in picked)):
        return Move(box.target, file, source)
    return Move(box.target, file, source, (Gather(shape, picked, item),))


def _trim(move: Move, start: int, stop: int) -> Iterator[Move]:
    """`move` without what lies outside the interval, which an interval that cuts an element leaves at its ends."""
    offset, length, _ = move.target
    if start <= offset and move.target.stop <= stop:
        yield move
        return
    for done, at in enumerate(move.target.offsets()):
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield _piece(move, done * length + low, done * length + high, Runs(at + low, high - low))


def _piece(move: Move, low: int, high: int, target: Runs) -> Move:
    """Bytes `low` to `high` of what `move` makes, sent to `target`."""
    if not move.kernels:
        if isinstance(move.source, bytes):
            return Move(target, None, move.source[low:high])
        if isinstance(move.source, Runs) and not move.source.grid:
            return Move(target, move.file, Runs(move.source.offset + low, high - low))
    return Move(target, move.file, move.source, (*move.kernels, Cut(low, high)))


def _rows(start: int, stop: int, row: int, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """The interval as (first row, last row, first byte, last byte) of bands of full rows or parts of one row."""
    while start < stop:
        first, low = divmod(start, row)
        count = min((stop - start) // row, max(limit // row, 1)) if low == 0 else 0
        if count:
            yield first, first + count, 0, row
            start += count * row
        else:
            high = min(row, low + stop - start)
            yield first, first + 1, low, high
            start += high - low


def _spread(move: Move, width: int, row: int, begin: int) -> Iterator[Move]:
    """`move`, which makes bytes of a tensor with rows of `width`, for a tensor that has those rows inside rows of
    `row` bytes, from byte `begin` of each on."""
    if width == row:
        yield move
        return
    done = 0
    for offset in move.target.offsets():
        end = offset + move.target.length
        while offset < end:
            first, low = divmod(offset, width)
            rows = (end - offset) // width if low == 0 else 0
            length = rows * width or min(width - low, end - offset)
            target = (
                Runs(first * row + begin, width, ((rows, row),))
                if rows > 1
                else Runs(first * row + begin + low, length)
            )
            if length == move.target.nbytes:
                yield move._replace(target=target)
            else:
                yield _piece(move, done, done + length, target)
            done += length
            offset += length
