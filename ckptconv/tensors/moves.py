"""Moves: runs of bytes in files, and the kernels applied to them on the way to the output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

# The largest unit of work: buffers of 256 KiB to 1 MiB stay in the second-level cache and copy fastest.
BLOCK = 1 << 20


# A gap of this many bytes between two runs is cheaper to read than to skip with one more system call.
GAP = 2048


Order: TypeAlias = Literal["output", "source"]
# The name of a dtype, as a field of a kernel.
DTypeName: TypeAlias = Annotated[str, "dtype"]
# What is applied to bytes on their way: one of the named tuples below, or another that `kernels` knows how to make.
Kernel: TypeAlias = "tuple[Any, ...]"


class File(NamedTuple):
    """A file as a source of bytes: its URL or path, its size, and a stamp that identifies this version of its content.

    If it is compressed inside another file, `packed` says where, and `path` is for messages only.
    """

    path: str
    size: int
    stamp: str = ""
    packed: Packed | None = None

    @property
    def stored(self) -> File:
        """The file as it is stored: itself, or the one that contains it compressed."""
        return self.packed.file if self.packed else self


class Packed(NamedTuple):
    """Compressed data: `nbytes` bytes from byte `offset` of `file`.

    `method` is "deflate", "zstandard", or "overwriting": new bytes of a tensor and their positions, as a delta has
    them, compressed with zstandard, of which the units that `Overlay` takes are made. `crc` is the CRC-32 of the
    uncompressed data, if it is recorded.
    """

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
        """The end of the last run; distances are never negative."""
        return self.offset + self.length + sum((count - 1) * distance for count, distance in self.grid)

    def offsets(self) -> Iterator[int]:
        """Yield the offset of each run, in the order in which they are packed."""
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
    """Pick elements of `itemsize` bytes from the packed source by strides (in bytes), into C order."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Cast(NamedTuple):
    """Convert elements from one dtype to another, with one correct rounding each."""

    source: DTypeName
    target: DTypeName


class Swap(NamedTuple):
    """Reverse the bytes of every unit of `itemsize` bytes: big-endian to little-endian."""

    itemsize: int


class Negate(NamedTuple):
    """Flip the sign of every element: resolves torch's neg bit."""

    dtype: DTypeName


class Conjugate(NamedTuple):
    """Flip the sign of every imaginary part: resolves torch's conj bit."""

    dtype: DTypeName


class Cut(NamedTuple):
    """Keep bytes `start` to `stop` of the result of the kernels before."""

    start: int
    stop: int


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


class Xor(NamedTuple):
    """Combine bytes by exclusive or. The input is `blocks` blocks of equal size, one after the other."""

    blocks: int


class Overlay(NamedTuple):
    """Replace some bytes: the input is the bytes as they were, then for each of `layers` a unit of two bytes for each.

    The bits of 1 in the second byte of a unit say which bits of the first replace those that were there.
    """

    layers: int


class WeightedSum(NamedTuple):
    """Add up numbers in float64, in their order, each times its weight, and divide by `over`: the result is float64.

    The input has the same number of elements of each of `dtypes`, kind after kind. A sum that is not a number is the
    quiet NaN without a sign or payload.
    """

    dtypes: tuple[str, ...]
    weights: tuple[float, ...]
    over: float


class Dequantize(NamedTuple):
    """Make weights of quantized ones: (code − zero − `offset`) · scale, as float32; of more steps, one in another.

    The first part has the codes. `codes` says how they lie there: "own", each an element of its dtype; "e2m1", two in a
    byte, the low half first; "int2" to "int8", so many bits of 32-bit words, the low ones first; "awq", 4 bits in the
    order of AWQ; "table4", two in a byte, the high half first, or "table8": indices into the part `table`.
    `roles` names the other parts: "scale"; "zero", stored as the codes are, or as int8; "index", the group of each
    column, by which scales and zeros are looked up; "table"; "shift", which is added to the product.
    `over`: divide by the scale. `between` is the dtype that the result is rounded to. `scales` names the scales in
    messages.
    """

    codes: str
    roles: tuple[str, ...]
    offset: int = 0
    over: bool = False
    between: DTypeName = "float32"
    scales: str = ""


class Quantize(NamedTuple):
    """Make codes, or the scales of blocks, of numbers: the part is those numbers.

    `made` is "codes" or "scales". A block has `rows` by `columns` of the last two dimensions; those at the edges may
    have fewer. Its scale is the largest of its absolute values over `largest`, in float32, rounded to dtype `scale`, or
    with `power` up to a power of two; 1 where all are zero. A code is the number over the scale in float32, rounded to
    nearest, ties to even: as `codes` says a float8_e4m3fn, for "int4" an integer from −8 on, stored 8 more, eight in a
    32-bit word, or an "e2m1", two in a byte, the first in the lowest bits. `exact`: codes times scales have to be the
    numbers, bit for bit. `name` is that of the numbers in messages.
    """

    made: str
    codes: str
    scale: str
    rows: int
    columns: int
    largest: float
    power: bool
    exact: bool
    name: str


class Rescale(NamedTuple):
    """Make of scales that are powers of two (float8_e8m0fnu), for 32 elements each, those of NVFP4, for 16: `made` is
    "scales", float8_e4m3fn, or "global", by which they are divided, one float32.

    The last part has all scales of the weight. For "scales" the first has the codes, two e2m1 in a byte, and the second
    the scales of the tile: one too small for float8_e4m3fn is 0, and its codes have to be zeros. `name` is that of the
    weight.
    """

    made: str
    name: str


class LowRank(NamedTuple):
    """Add a product of two matrices, times `scale`, in float64: the parts are what it is added to, and the factors.

    The first factor has the inner dimension last, the second has it first. Products are added in its order.
    """

    scale: float


class Magnitude(NamedTuple):
    """Give the rows of a matrix of float64 other lengths: the parts are whole rows, and the lengths.

    A row is multiplied by its new length over its own, the root of the sum of squares, which are added in order.
    """


# Those that cast what they make themselves, as they make it.
CASTING = (Dequantize, LowRank)


class Box(NamedTuple):
    """Part of an input of a tile: elements of `dtype`, `counts` of them from index `starts` on along each dimension.

    `axes` say what its dimensions are (`lazy.Axis`). It lies at byte `offset` of the tile's source.
    """

    offset: int
    dtype: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    axes: tuple[Any, ...]


class Tile(NamedTuple):
    """Make the tile of `counts` elements from index `starts` on of boxes of several inputs, by `kernel`.

    `cast` is the dtype that its elements are cast to as they are made, if that is another.
    """

    kernel: Kernel
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    boxes: tuple[Box, ...]
    cast: str = ""


class Assembled(NamedTuple):
    """The results of several moves, in `nbytes` bytes that contain their targets."""

    moves: tuple[Move, ...]
    nbytes: int


class Move(NamedTuple):
    """A unit of work no larger than one buffer.

    Read `source` from `file`, packed run after run. If `file` is None, `source` is the bytes themselves, or what other
    moves make. Apply `kernels` in turn. Put the result at `target` of the tensor, run after run.
    """

    target: Runs
    file: File | None
    source: Runs | bytes | Assembled
    kernels: tuple[Kernel, ...] = ()
