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
# A kernel, which is applied to bytes on their way: one of the named tuples below, or another that `kernels` knows.
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
        """The file as it is stored: itself, or the one that contains it compressed, perhaps in another that is."""
        return self.packed.file.stored if self.packed else self


class Packed(NamedTuple):
    """Compressed data: `nbytes` bytes from byte `offset` of `file`.

    `method` is one of those that the feature `compressed` knows.
    `crc` is the CRC-32 of the uncompressed data, if it is recorded.
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


class Assembled(NamedTuple):
    """The results of several moves, in `nbytes` bytes that contain their targets."""

    moves: tuple[Move, ...]
    nbytes: int


class Move(NamedTuple):
    """A unit of work no larger than one buffer.

    Read `source` from `file`, packed run after run. If `file` is None, `source` is the bytes themselves, or the moves
    that make them. Apply `kernels` in turn. Put the result at `target` of the tensor, run after run.
    """

    target: Runs
    file: File | None
    source: Runs | bytes | Assembled
    kernels: tuple[Kernel, ...] = ()
