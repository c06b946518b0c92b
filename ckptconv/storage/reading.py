"""Readers of files, ranges, and entries of file systems. No file is opened here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckptconv.errors import CorruptError
from ckptconv.storage.paths import is_remote
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from typing_extensions import Self

Options = dict[str, Any]

REQUESTS = 8  # that run at a time
# Parts of descriptions: the gap between two that is cheaper to read than to skip, in a local and in a remote file, and
# the bytes to read at once.
MAX_GAP_LOCAL, MAX_GAP_REMOTE, DESCRIPTIONS = 1 << 9, 1 << 18, 1 << 20


def max_gap(file: File) -> int:
    """Return the largest gap (bytes) between parts of descriptions in `file` that is cheaper to read than to skip."""
    return MAX_GAP_REMOTE if is_remote(file.path) else MAX_GAP_LOCAL


class Range(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    file: File
    start: int
    stop: int


class Entry(NamedTuple):
    """The entry at a path: "file", "directory", "other" (a pipe, a device), or "missing"; its last change (seconds)."""

    kind: str
    file: File
    time: float | None = None

    @property
    def described(self) -> str:
        """The kind with its article."""
        return "a pipe or a device" if self.kind == "other" else f"a {self.kind}"


class Reader:
    """Ranged reads of one file, safe to use from several threads.

    `read_at` and `fill` call each other: a reader must define one of them.
    """

    file: File

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises CorruptError if the file ends before that."""
        data = bytearray(length)
        self.fill(offset, [memoryview(data)])
        return bytes(data)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` one after another with the bytes from `offset` on."""
        for buffer in buffers:
            buffer[:] = self.read_at(offset, len(buffer))
            offset += len(buffer)

    def fill_runs(self, offsets: Iterable[int], length: int, out: memoryview) -> None:
        """Fill `out` with runs of `length` bytes, one from each of `offsets`, one after another."""
        for at, offset in enumerate(offsets):
            self.fill(offset, [out[at * length : (at + 1) * length]])

    def close(self) -> None:
        """Close the reader's file or connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sources(Protocol):
    """Opens readers of files."""

    def reading(self, file: File) -> AbstractContextManager[Reader]: ...


def ends_early(path: str, end: int, wanted: int) -> CorruptError:
    return CorruptError(
        f"{path} ends at byte {end}, but {wanted} more bytes were expected: the file is truncated, or was truncated "
        "while being read."
    )


WRITTEN = "Try again when no program is writing to the file."


def changed(file: File, now: Entry) -> CorruptError:
    size = f"now has {now.file.size}" if now.file.size != file.size else "was written again"
    change = size if now.kind == "file" else "is gone now"
    return CorruptError(
        f"{file.path} changed while it was read (it had {file.size} bytes, and {change}). The file was not converted.",
        WRITTEN,
    )
