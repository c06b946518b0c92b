"""Where outputs grow, and how they are published: in one step, so that a name means a finished output.

Whoever makes an output enters its staging, asks what an earlier run has `finished`, says what it `expect`s to make, and
then for each file calls `create`, writes, and calls `seal` and `record`. At the end it calls `commit`, or, having made
parts of an output, `detach`.
"""

from __future__ import annotations

import contextlib
import errno
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ckptconv.errors import CkptconvError, FailedError, StoppedError
from ckptconv.plan import FilePlan
from ckptconv.publish.manifest import Made, made
from ckptconv.storage.files import Reader
from ckptconv.storage.handles import ForeignError
from ckptconv.storage.writing import BusyError, Writer

# A full disk is not left full of what may never be wanted.
_FULL = (errno.ENOSPC, errno.EDQUOT)
GO_ON = "Run the same command again when that is mended: it goes on from there."
# Bytes that are read at a time to compare a file with the checksums of its record.
_READ = 4 << 20


@dataclass
class Staging:
    """An output that grows beside its final place and is published by `commit`.

    Used as a context: left by an exception, it removes what it staged, and nothing new stands under a final name.
    """

    plan_id: str
    durable: bool = True
    # Whether files are being given their final names, and whether all have them.
    committing: bool = False
    committed: bool = False
    # Whether an output that was made in parts is put together: those who made them said that they were done, and what
    # says something else is an error, and not made again.
    finishing: bool = False
    path: str = ""
    # Files that have a record: resumed, or made by this run, here or by an executor.
    recorded: set[str] = field(default_factory=set)
    _writers: list[Writer] = field(default_factory=list)

    def finished(self, name: str, size: int) -> Made | None:
        """What an earlier run of the same plan has made under `name`; None where it has to be made."""
        found = self._known(name, size)
        if found is None:
            return None
        self.recorded.add(name)
        return made(found)

    def check(self, name: str, size: int, progress: Callable[[int], None] | None = None) -> bool:
        """Read a finished file again: whether it still has the checksums of its record. If not, that is removed.

        `progress` is called with the bytes read since the last call.
        """
        found = self._known(name, size)
        if found is None:
            return False
        if not self._has_checksums(name, found, progress):
            self._forget(name)
            return False
        return True

    def _has_checksums(
        self, name: str, found: Mapping[str, Any], progress: Callable[[int], None] | None = None
    ) -> bool:
        """Whether the file `name` has the checksums of its record `found`, as far as that has any."""
        with self._reading(name, found) as reader:
            for start, length, crc, _ in found["spans"]:
                if crc is not None and _digest(reader, start, length) != crc:
                    return False
                if progress:
                    progress(length)
        return True

    def _known(self, name: str, size: int) -> dict[str, Any] | None:
        """The record of a file that is as it says."""
        return None

    def _reading(self, name: str, found: Mapping[str, Any]) -> contextlib.AbstractContextManager[Reader]:
        """A reader of the file `name`, whose record is `found`."""
        raise NotImplementedError

    def _forget(self, name: str) -> None:
        """Remove the record of a file."""

    def expect(self, files: Iterable[FilePlan]) -> None:
        """Raise FailedError where there is no room for `files`, which are to be made."""

    def describe(self, data: bytes) -> None:
        """Leave the description of the plan for `finish`."""
        raise NotImplementedError

    def create(self, name: str, size: int) -> Writer:
        """A writer for the output file `name` of `size` bytes."""
        raise NotImplementedError

    def put(self, name: str, data: bytes) -> Writer:
        """Stage a small file, all of it, to be sealed later: the disk need not be waited for at once."""
        writer = self.create(name, len(data))
        writer.write_at(0, memoryview(data))
        return writer

    def seal(self, writer: Writer) -> None:
        """Put a file on the disk, to which nothing more is written, and close it."""
        if self.durable:
            writer.sync()
        writer.close()
        self._writers.remove(writer)

    def record(self, file: FilePlan, crcs: Mapping[str, int] | None) -> None:
        """Write the record that `file`, which was sealed, is finished; `crcs` are the CRC-32 of its tensors."""

    def staged(self, name: str) -> str:
        """Where the output file `name` is until it is published."""
        raise NotImplementedError

    def elsewhere(self) -> Staging:
        """The same for another process, which makes files of it while this one holds the lock. Can be pickled."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """In that process: open the place, and close at the end what is open."""
        try:
            yield
        finally:
            self._close_writers()

    def commit(self, names: Sequence[str]) -> None:
        """Publish the files created, the one named last as the last."""
        raise NotImplementedError

    def detach(self) -> None:
        """Release the lock and keep the staged files, for `finish` or a later run; after a commit, remove the rest."""

    def keep(self) -> str:
        """Keep what is finished for the next run, and nothing else; "" if nothing is, else what to say of it."""
        return ""

    def discard(self) -> None:
        """Remove what was staged."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what is open."""

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
        """How many files are kept, as the subject of a sentence."""
        count = len(self.recorded)
        return "1 finished file is" if count == 1 else f"{count} finished files are"


def may_go_on(error: BaseException) -> bool:
    """Whether the same command may well succeed when it is run again: what it has finished is of use then."""
    if isinstance(error, FailedError):
        busy = isinstance(error, (BusyError, ForeignError))
        return not busy and getattr(error.__cause__, "errno", None) not in _FULL
    return isinstance(error, (StoppedError, KeyboardInterrupt))


def _digest(reader: Reader, start: int, length: int) -> int:
    crc = 0
    for at in range(start, start + length, _READ):
        crc = zlib.crc32(reader.read_at(at, min(_READ, start + length - at)), crc)
    return crc
