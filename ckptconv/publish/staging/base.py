"""Where outputs grow, and how they are published: in one step, so that a name means a finished output.

One file is a hidden sibling that is renamed; several grow in a hidden directory, and the file that makes them whole,
the index, comes last. What a living process stages is locked. What a dead one left is taken up again by the next run
of the same plan, as far as there are records that it is finished, and removed by the next run of another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ckptconv.errors import CkptconvError, FailedError, StoppedError
from ckptconv.plan import FilePlan
from ckptconv.publish.manifest import Made
from ckptconv.publish.staging.area import allocated, hidden, is_sibling, remove_dead
from ckptconv.storage.handles import ForeignError, Handle, resolved
from ckptconv.storage.writing import BusyError, LocalWriter, Writer, check_space, writing

# A full disk is not left full of what may never be wanted.
_FULL = (errno.ENOSPC, errno.EDQUOT)
GO_ON = "Run the same command again when that is mended: it goes on from there."


@dataclass
class Staging:
    """An output that grows beside its final place and is published by `commit`.

    Used as a context: left by an exception, it removes what it staged, and nothing new stands under a final name.
    """

    plan_id: str
    durable: bool = True
    # Whether files are being given their final names, and whether all have them.
    publishing: bool = False
    committed: bool = False
    path: str = ""
    _writers: list[Writer] = field(default_factory=list)

    def finished(self, name: str, size: int) -> Made | None:
        """What an earlier run of the same plan has made under `name`; None where it has to be made."""
        return None

    def describe(self, data: bytes) -> None:
        """Leave word of the plan for who puts the parts together."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let what is staged stay as it is; remove what is left of it after a commit."""
        raise NotImplementedError

    def elsewhere(self) -> Staging:
        """The same for another process, which makes files of it while this one has the place locked."""
        raise NotImplementedError

    def take_note(self, name: str) -> None:
        """Another process has noted that the file `name` is finished."""

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """In that process: have what is open closed at the end."""
        try:
            yield
        finally:
            for writer in self._writers:
                with contextlib.suppress(OSError, CkptconvError):
                    writer.close()
            self._writers.clear()

    def expect(self, files: Iterable[FilePlan]) -> None:
        """Raise FailedError where there is no room for `files`, which are to be made."""

    def create(self, name: str, size: int) -> Writer:
        """A writer for the output file `name` of `size` bytes."""
        raise NotImplementedError

    def staged(self, name: str) -> str:
        """Where the output file `name` is until it is published."""
        raise NotImplementedError

    def note(self, file: FilePlan, crcs: Mapping[str, int] | None) -> None:
        """Keep a record that `file` is finished; `crcs` are the CRC-32 of its tensors.

        It counts for as long as the machine runs, and beyond that once `confirm` has said that the file is sealed.
        """

    def confirm(self, name: str) -> None:
        """What was noted of a file survives a power cut from now on, as the file does."""

    def commit(self, names: Sequence[str]) -> None:
        """Publish the files created, the one named last as the last."""
        raise NotImplementedError

    def put(self, name: str, data: bytes) -> Writer:
        """Stage a small file, all of it, and seal it later: the disk need not be waited for at once."""
        writer = self.create(name, len(data))
        writer.write_at(0, memoryview(data))
        return writer

    def seal(self, writer: Writer) -> None:
        """Nothing more comes for a file: put it on the disk, and let go of it."""
        if self.durable:
            writer.sync()
        writer.close()
        self._writers.remove(writer)

    def discard(self) -> None:
        """Remove what was staged."""
        raise NotImplementedError

    def keep(self) -> str:
        """Let what is finished stay for the next run, and nothing else; "" if nothing is, else what to say of it."""
        return ""

    def close(self) -> None:
        """Let go of what is open."""

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError, CkptconvError):
                writer.close()
        self._writers.clear()
        with contextlib.suppress(OSError):
            if self.committed:
                self.leave()
            elif error is not None:
                kept = self.keep() if self.publishing or may_go_on(error) else ""
                if not kept:
                    self.discard()
                elif isinstance(error, CkptconvError) and kept not in error.hint:
                    error.hint = f"{error.hint} {kept}".strip()
        self.close()


def may_go_on(error: BaseException) -> bool:
    """Whether the same command may well succeed when it is run again: what it has finished is of use then."""
    if isinstance(error, FailedError):
        busy = isinstance(error, (BusyError, ForeignError))
        return not busy and getattr(error.__cause__, "errno", None) not in _FULL
    return isinstance(error, (StoppedError, KeyboardInterrupt))


class FileStaging(Staging):
    """One output file, staged as a hidden sibling and renamed over its name."""

    def __init__(self, path: str, plan_id: str, durable: bool = True) -> None:
        super().__init__(plan_id, durable)
        self.path = resolved(path)
        self.directory, self._name = os.path.split(self.path)
        self._prefix = hidden(self._name)
        self._hidden = self._prefix + plan_id
        self._home: Handle | None = None
        self._writer: LocalWriter | None = None

    def expect(self, files: Iterable[FilePlan]) -> None:
        with writing(self.path), Handle.open(self.directory) as home:
            check_space(self.directory, sum(file.size for file in files) - allocated(home, self._hidden))

    def create(self, name: str, size: int) -> Writer:
        with writing(self.path):
            home = self._home = Handle.open(self.directory)
            for stale in home.names():
                if is_sibling(stale, self._prefix) and stale != self._hidden:
                    remove_dead(home, stale)
            check_space(self.directory, size - allocated(home, self._hidden))
        try:
            self._writer = LocalWriter(os.path.join(self.directory, self._hidden), size, home)
        except ForeignError:
            # Somebody else has taken the name, which any other can stand in for.
            self._hidden += f"-{secrets.token_hex(4)}"
            self._writer = LocalWriter(os.path.join(self.directory, self._hidden), size, home)
        self._writers.append(self._writer)
        return self._writer

    def staged(self, name: str) -> str:
        return os.path.join(self.directory, self._hidden)

    def seal(self, writer: Writer) -> None:
        # The file stays open, and with it locked, until it has its name.
        if self.durable:
            writer.sync()

    def commit(self, names: Sequence[str]) -> None:
        assert self._home is not None
        assert self._writer is not None
        if not self._writer.is_at(self._home, self._hidden):
            raise FailedError(
                f"{self.staged('')} is not the file any more that was written there: somebody else has replaced it. "
                f"{self.path} was left as it is.",
                "Write to a directory that only you can write to.",
            )
        with writing(self.path):
            self._home.replace(self._hidden, self._home, self._name)
        self.committed = True
        if self.durable:
            self._home.sync()

    def leave(self) -> None:
        self.close()

    def discard(self) -> None:
        if self._home is not None and self._writer is not None:
            self._home.unlink(self._hidden)

    def close(self) -> None:
        if self._home is not None:
            self._home.close()
            self._home = None


# ------------------------------------------------------------------------------------------------ staging directories
