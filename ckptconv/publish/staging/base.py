"""Staging: where outputs are written, and how they are published in one step, so that a name means a finished output.

A process that makes an output enters its staging, asks which files an earlier run has `finished`, names the files to
`expect`, and for each file calls `create`, writes, and calls `seal` and `record`. At the end it calls `commit`, or
`detach` if it made only parts of an output.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import CkptconvError, FailedError, StoppedError
from ckptconv.plan import FilePlan
from ckptconv.storage.handles import ForeignError
from ckptconv.storage.reading import Reader
from ckptconv.storage.writing import BusyError, Writer

if TYPE_CHECKING:
    from ckptconv.storage.digests import Digests

# On a full disk, staged files are not kept: they may never be wanted.
_FULL = (errno.ENOSPC, errno.EDQUOT)
GO_ON = "Fix the cause, and run the same command again to continue."
# Bytes to read at a time when a file is compared with the checksums of its record.
_READ = 4 << 20


class FinishedFile(NamedTuple):
    """A finished file of an output: its size, the CRC-32 of each tensor by name, None where none was computed, and the
    content digests if they were asked for."""

    size: int
    crcs: Mapping[str, int | None]
    digests: Digests | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> FinishedFile:
        """Return the file that a record describes."""
        crcs = {name: crc for _, _, crc, name in record["spans"] if name is not None}
        if "digests" not in record:
            return cls(record["size"], crcs)
        from ckptconv.storage.digests import Digests

        return cls(record["size"], crcs, Digests(**record["digests"]))

    @property
    def digested(self) -> bool:
        """Whether the CRC-32 of every tensor is known."""
        return None not in self.crcs.values()


@dataclass(eq=False, repr=False)
class Staging:
    """An output that is written near its final path and published by `commit`.

    As a context manager: after an exception it removes the staged files, except finished ones that the same command can
    reuse (`keep`). If `commit` had not begun, nothing new has a final name.
    """

    plan_id: str
    durable: bool = True
    # Whether `commit` has begun to give files their final names, and whether all have them.
    committing: bool = False
    committed: bool = False
    # Whether this is `finish`: every part was reported done, so a bad record is an error; its file is not made again.
    finishing: bool = False
    path: str = ""
    # The kind with which its files are marked, on a disk.
    made_as: str = ""
    # Files with a record: resumed, or made by this run, here or by an executor.
    recorded: set[str] = field(default_factory=set)
    _writers: list[Writer] = field(default_factory=list)

    def finished(self, name: str, size: int, digest: str = "") -> FinishedFile | None:
        """Return the file `name` as an earlier run of the same plan has made it; None if it has to be made.

        With `digest`, an algorithm, it has content digests: if its record has none, the file is read once more.
        """
        record = self._known(name, size)
        if record is None:
            return None
        self.recorded.add(name)
        result = FinishedFile.of(record)
        if not digest or (result.digests and result.digests.algorithm == digest):
            return result if digest else result._replace(digests=None)
        from ckptconv.storage.digests import digests_of

        with self._reading(name, record) as reader:
            ranges = [(at, nbytes, tensor) for at, nbytes, _, tensor in record["spans"] if tensor is not None]
            return result._replace(digests=digests_of(reader.read_at, size, ranges, digest))

    def check(self, name: str, size: int, progress: Callable[[int], object] | None = None) -> bool:
        """Read a finished file again; return whether it has the checksums of its record. If not, remove the record.

        `progress` is called with the bytes read since the last call.
        """
        record = self._known(name, size)
        if record is None:
            return False
        if not self._has_checksums(name, record, progress):
            self._forget(name)
            return False
        return True

    def _has_checksums(
        self, name: str, record: Mapping[str, Any], progress: Callable[[int], object] | None = None
    ) -> bool:
        """Return whether the file `name` matches the checksums in its `record`."""
        with self._reading(name, record) as reader:
            for start, length, crc, _ in record["spans"]:
                if crc is not None and _digest(reader, start, length) != crc:
                    return False
                if progress:
                    progress(length)
        return True

    def _known(self, name: str, size: int) -> dict[str, Any] | None:
        """Return the record of a file that matches it, else None."""
        return None

    def _reading(self, name: str, entry: Mapping[str, Any]) -> contextlib.AbstractContextManager[Reader]:
        """Return a reader of the file `name`, whose record is `entry`."""
        raise NotImplementedError

    def _forget(self, name: str) -> None:
        """Remove the record of a file."""

    def expect(self, files: Iterable[FilePlan]) -> None:
        """Raise FailedError if there is no room for `files`, which are about to be made."""

    def describe(self, data: bytes) -> None:
        """Write the description of the plan, for `finish`."""
        raise NotImplementedError

    def create(self, name: str, size: int) -> Writer:
        """Return a writer for the output file `name` of `size` bytes."""
        raise NotImplementedError

    def put(self, name: str, data: bytes) -> Writer:
        """Stage a small file with the content `data`; `seal` it later, as there is no need to wait for the disk now."""
        writer = self.create(name, len(data))
        writer.write_at(0, memoryview(data))
        return writer

    def seal(self, writer: Writer) -> None:
        """Mark a completely written file, sync it to the disk (if `durable`), and close it."""
        if self.made_as:
            writer.mark(self.made_as)
        if self.durable:
            writer.sync()
        writer.close()
        self._writers.remove(writer)

    def record(self, file: FilePlan, crcs: Mapping[str, int] | None, digests: Digests | None = None) -> None:
        """Write the record that `file`, already sealed, is finished. `crcs` are the CRC-32 of its tensors by name."""

    def staged(self, name: str) -> str:
        """Return the path of the output file `name` before it is published."""
        raise NotImplementedError

    def elsewhere(self) -> Staging:
        """Return a picklable copy for another process, which writes files while this one holds the lock."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """In that process: open the staging, and close everything at the end."""
        try:
            yield
        finally:
            self._close_writers()

    def commit(self, names: Sequence[str]) -> None:
        """Publish the files that were created, the index last."""
        raise NotImplementedError

    def detach(self) -> None:
        """Release the lock and keep the staged files, for `finish` or a later run; after a commit, remove the rest."""

    def keep(self) -> str:
        """Keep only the finished files, for the next run. Return a sentence that says so; "" if nothing is kept."""
        return ""

    def discard(self) -> None:
        """Remove the staged files."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all descriptors."""

    def _close_writers(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError, CkptconvError):
                writer.close()
        self._writers.clear()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_writers()
        with contextlib.suppress(OSError):
            if self.committed:
                self.detach()
            elif error is not None:
                kept = self.keep() if self.committing or may_go_on(error) else ""
                if not kept:
                    self.discard()
                elif isinstance(error, CkptconvError) and kept not in error.hint:
                    error.hint = f"{error.hint} {kept}".strip()
        self.close()

    def _kept_files(self) -> str:
        """Return the number of kept files, as the subject of a sentence."""
        count = len(self.recorded)
        return "1 finished file is" if count == 1 else f"{count} finished files are"


def may_go_on(error: BaseException) -> bool:
    """Return whether the same command is likely to succeed when run again, and can then reuse the finished files."""
    if isinstance(error, FailedError):
        busy = isinstance(error, (BusyError, ForeignError))
        return not busy and getattr(error.__cause__, "errno", None) not in _FULL
    return isinstance(error, (StoppedError, KeyboardInterrupt))


def _digest(reader: Reader, start: int, length: int) -> int:
    from ckptconv.storage.crc import crc32

    crc = 0
    for at in range(start, start + length, _READ):
        crc = crc32(reader.read_at(at, min(_READ, start + length - at)), crc)
    return crc
