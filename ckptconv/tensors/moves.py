"""Moves: runs of bytes in files, and the kernels that they pass on their way to an output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

# The largest piece of work: buffers of 256 KiB to 1 MiB stay in the second-level cache and copy fastest.
BLOCK = 1 << 20


# Bytes between two runs that are cheaper to read along than to skip with one more system call.
GAP = 2048


Order: TypeAlias = Literal["output", "source"]


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


class Assembled(NamedTuple):
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
    source: Runs | bytes | Assembled
    kernels: tuple[Kernel, ...] = ()
