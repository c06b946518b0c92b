"""Where outputs grow, and how they are published: in one step, so that a name means a finished output.

One file is a hidden sibling that is renamed; several grow in a hidden directory, and the file that makes them whole,
the index, comes last. What a living process stages is locked; what a dead one left is removed by the next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from .errors import CkptconvError, UsageError
from .storage import BusyError, LocalWriter, Writer, check_space, is_locked, lock, sync_directory, writing


@dataclass
class Staging:
    """An output that grows beside its final place and is published by `commit`.

    Used as a context: left by an exception, it removes what it staged, and nothing new stands under a final name.
    """

    plan_id: str
    durable: bool = True
    _writers: list[Writer] = field(default_factory=list)

    def create(self, name: str, size: int) -> Writer:
        """A writer for the output file `name` of `size` bytes."""
        raise NotImplementedError

    def staged(self, name: str) -> str:
        """Where the output file `name` is until it is published."""
        raise NotImplementedError

    def commit(self, names: Sequence[str]) -> None:
        """Publish the files created, the one named last as the last."""
        raise NotImplementedError

    def seal(self, writer: Writer) -> None:
        """Nothing more comes for a file: put it on the disk, and let go of it."""
        if self.durable:
            writer.sync()
        writer.close()
        self._writers.remove(writer)

    def discard(self) -> None:
        """Remove what was staged."""
        raise NotImplementedError

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError, CkptconvError):
                writer.close()
        self._writers.clear()
        if kind is not None:
            with contextlib.suppress(OSError):
                self.discard()


def _hidden(name: str) -> str:
    """What the hidden siblings of `name` begin with. A name may be as long as a file system allows: they may not."""
    return f".{os.fsdecode(os.fsencode(name)[:200])}.ckptconv-"


class FileStaging(Staging):
    """One output file, staged as a hidden sibling and renamed over its name."""

    def __init__(self, path: str, plan_id: str, durable: bool = True) -> None:
        super().__init__(plan_id, durable)
        self.path = os.path.realpath(path)
        self.directory, name = os.path.split(self.path)
        self._prefix = _hidden(name)
        self.temporary = os.path.join(self.directory, self._prefix + plan_id)
        self._foreign = False

    def create(self, name: str, size: int) -> Writer:
        with writing(self.path):
            found = os.listdir(self.directory)
        for stale in found:
            path = os.path.join(self.directory, stale)
            if stale.startswith(self._prefix) and path != self.temporary and not is_locked(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        check_space(self.directory, size)
        try:
            writer = LocalWriter(self.temporary, size)
        except BusyError:
            self._foreign = True
            raise
        self._writers.append(writer)
        return writer

    def staged(self, name: str) -> str:
        return self.temporary

    def seal(self, writer: Writer) -> None:
        # The file stays open, and with it locked, until it has its name.
        if self.durable:
            writer.sync()

    def commit(self, names: Sequence[str]) -> None:
        with writing(self.path):
            os.replace(self.temporary, self.path)
        if self.durable:
            sync_directory(self.directory)

    def discard(self) -> None:
        if not self._foreign:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.temporary)


class DirectoryStaging(Staging):
    """A directory of output files, staged in a hidden directory inside it.

    `is_ours(name)` tells which files of an earlier output the new one replaces; `index` is the name that makes an
    output whole: it is removed first and written last, so that a kill in between leaves no index, never a wrong one.
    """

    def __init__(
        self, path: str, plan_id: str, is_ours: Callable[[str], bool], index: str, durable: bool = True
    ) -> None:
        super().__init__(plan_id, durable)
        self.path = os.path.realpath(path)
        self.staging = os.path.join(self.path, f".ckptconv-{plan_id}")
        self.index = index
        self.is_ours = is_ours
        self._made: list[str] = []
        self._guard = -1
        self._ours = False

    def __enter__(self) -> Staging:
        try:
            self._prepare()
        except BaseException:
            self.discard()
            raise
        return self

    def _prepare(self) -> None:
        missing = self.path
        while not os.path.exists(missing):
            self._made.append(missing)
            missing = os.path.dirname(missing)
        with writing(self.path):
            os.makedirs(self.staging, exist_ok=True)
            self._guard = os.open(os.path.join(self.staging, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            lock(self._guard, self.path)
            self._ours = True
            for stale in os.listdir(self.path):
                path = os.path.join(self.path, stale)
                if stale.startswith(".ckptconv-") and path != self.staging and os.path.isdir(path):
                    guard = os.path.join(path, ".lock")
                    if not (os.path.exists(guard) and is_locked(guard)):
                        _remove_files(path)

    def create(self, name: str, size: int) -> Writer:
        check_space(self.staging, size)
        writer = LocalWriter(os.path.join(self.staging, name), size)
        self._writers.append(writer)
        return writer

    def staged(self, name: str) -> str:
        return os.path.join(self.staging, name)

    def commit(self, names: Sequence[str]) -> None:
        with writing(self.path):
            previous = [name for name in os.listdir(self.path) if self.is_ours(name) and name not in names]
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, self.index))
            if self.durable:
                sync_directory(self.path)
            for name in sorted(names, key=lambda name: name == self.index):
                if name == self.index:
                    for old in previous:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(os.path.join(self.path, old))
                    previous = []
                    if self.durable:
                        sync_directory(self.path)
                os.replace(os.path.join(self.staging, name), os.path.join(self.path, name))
            for old in previous:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, old))
        if self.durable:
            sync_directory(self.path)
        self._release()

    def discard(self) -> None:
        self._release()
        for path in self._made:
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _release(self) -> None:
        if self._ours:
            _remove_files(self.staging)
        if self._guard >= 0:
            os.close(self._guard)
            self._guard = -1


def _remove_files(directory: str) -> None:
    """Remove a staging directory, which holds nothing but files."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


class TreeStaging(Staging):
    """A directory that is published as a whole, with files in directories of its own, and a file beside it after it.

    It grows as a hidden sibling. `marker` is a name inside by which an earlier output is known, which is replaced;
    a directory without it is not. `after` is the name of the file that is put beside the directory at the end.
    """

    def __init__(self, path: str, plan_id: str, marker: str, after: str, durable: bool = True) -> None:
        super().__init__(plan_id, durable)
        self.path = os.path.realpath(path)
        self.parent, name = os.path.split(self.path)
        self.staging = os.path.join(self.parent, _hidden(name) + plan_id)
        self.old = os.path.join(self.parent, _hidden(name) + "old")
        self.marker, self.after = marker, after
        self._guard = -1
        self._ours = False

    def __enter__(self) -> Staging:
        try:
            self._prepare()
        except BaseException:
            self.discard()
            raise
        return self

    def _prepare(self) -> None:
        with writing(self.path):
            present = os.listdir(self.path) if os.path.isdir(self.path) else []
            if present and self.marker not in present:
                raise UsageError(
                    f"{self.path} holds files of another kind, and would be replaced as a whole. Nothing was written.",
                    "Give a directory that does not exist yet.",
                )
            os.makedirs(self.staging, exist_ok=True)
            self._guard = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock(self._guard, self.path)
            self._ours = True
            _remove_below(self.staging)

    def create(self, name: str, size: int) -> Writer:
        place = os.path.join(self.staging, name)
        with writing(self.path):
            os.makedirs(os.path.dirname(place), exist_ok=True)
        check_space(self.staging, size)
        writer = LocalWriter(place, size)
        self._writers.append(writer)
        return writer

    def staged(self, name: str) -> str:
        return os.path.join(self.staging, name)

    def commit(self, names: Sequence[str]) -> None:
        with writing(self.path):
            beside = os.path.join(self.parent, self.after)
            staged = os.path.join(self.staging, self.after)
            if self.durable:
                for directory, _, _ in os.walk(self.staging):
                    sync_directory(directory)
            _remove_tree(self.old)
            if os.path.isdir(self.path):
                os.rename(self.path, self.old)
            os.rename(self.staging, self.path)
            os.replace(os.path.join(self.path, os.path.basename(staged)), beside)
            if self.durable:
                sync_directory(self.parent)
            _remove_tree(self.old)
        self._release()

    def discard(self) -> None:
        if self._ours:
            _remove_tree(self.staging)
        self._release()

    def _release(self) -> None:
        if self._guard >= 0:
            os.close(self._guard)
            self._guard = -1


def _remove_tree(directory: str) -> None:
    _remove_below(directory)
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _remove_below(directory: str) -> None:
    """Remove everything in a directory of ours; links are not followed."""
    for place, directories, files in os.walk(directory, topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(place, name))
        for name in directories:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(place, name))
