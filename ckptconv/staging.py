"""Where outputs grow, and how they are published: in one step, so that a name means a finished output.

One file is a hidden sibling that is renamed; several grow in a hidden directory, and the file that makes them whole,
the index, comes last. What a living process stages is locked. What a dead one left is taken up again by the next run
of the same plan, as far as there are records that it is finished, and removed by the next run of another.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .errors import CkptconvError, FailedError, StoppedError, UsageError
from .manifest import Made, made, read_record, record
from .plan import FilePlan
from .storage import BusyError, LocalWriter, Writer, check_space, is_locked, lock, sync_directory, writing
from .tensors import BLOCK

# A full disk is not left full of what may never be wanted.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Staging:
    """An output that grows beside its final place and is published by `commit`.

    Used as a context: left by an exception, it removes what it staged, and nothing new stands under a final name.
    """

    plan_id: str
    durable: bool = True
    _writers: list[Writer] = field(default_factory=list)

    def finished(self, name: str, size: int) -> Made | None:
        """What an earlier run of the same plan has made under `name`; None where it has to be made."""
        return None

    def describe(self, data: bytes) -> None:
        """Leave word of the plan for who puts the parts together."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let what is staged stay as it is."""
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

    def expect(self, size: int) -> None:
        """Raise FailedError where there is no room for `size` more bytes."""

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

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError, CkptconvError):
                writer.close()
        self._writers.clear()
        if error is None:
            return
        with contextlib.suppress(OSError):
            kept = self.keep() if may_go_on(error) else ""
            if not kept:
                self.discard()
            elif isinstance(error, CkptconvError):
                error.hint = f"{error.hint} {kept}".strip()


def may_go_on(error: BaseException) -> bool:
    """Whether the same command may well succeed when it is run again: what it has finished is of use then."""
    if isinstance(error, FailedError):
        return not isinstance(error, BusyError) and getattr(error.__cause__, "errno", None) not in _FULL
    return isinstance(error, (StoppedError, KeyboardInterrupt))


def hidden(name: str) -> str:
    """What the hidden siblings of `name` begin with. A name may be as long as a file system allows: they may not."""
    return f".{os.fsdecode(os.fsencode(name)[:200])}.ckptconv-"


class FileStaging(Staging):
    """One output file, staged as a hidden sibling and renamed over its name."""

    def __init__(self, path: str, plan_id: str, durable: bool = True) -> None:
        super().__init__(plan_id, durable)
        self.path = os.path.realpath(path)
        self.directory, name = os.path.split(self.path)
        self._prefix = hidden(name)
        self.temporary = os.path.join(self.directory, self._prefix + plan_id)
        self._foreign = False

    def expect(self, size: int) -> None:
        check_space(self.directory, size)

    def create(self, name: str, size: int) -> Writer:
        with writing(self.path):
            found = os.listdir(self.directory)
        for stale in found:
            path = os.path.join(self.directory, stale)
            if stale.startswith(self._prefix) and path != self.temporary:
                _remove_dead(path)
        self.expect(size)
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


class StagedDirectory(Staging):
    """Several files, or one in parts, that grow in a hidden directory: `staging`, with a lock and records of its own.

    Whoever makes a whole output has the directory to itself; those who make `shared` parts of it have it together.
    """

    def __init__(self, path: str, staging: str, plan_id: str, durable: bool, shared: bool) -> None:
        super().__init__(plan_id, durable)
        self.path = os.path.realpath(path)
        self.staging = staging
        self.shared = shared
        # Whether what another machine did not sync counts too: it said that it was done.
        self.lenient = False
        self._guard = -1
        self._made: list[str] = []
        # Files of this run, or taken over from one before, that have a record; and those that have their final name.
        self._noted: set[str] = set()
        self._renamed: set[str] = set()
        self._begun: set[str] = set()
        self._files = 0

    def place(self, name: str) -> str:
        """Where the file `name` grows."""
        return os.path.join(self.staging, name)

    def final(self, name: str) -> str:
        """Where it goes."""
        return os.path.join(self.path, name)

    def staged(self, name: str) -> str:
        return self.final(name) if name in self._renamed else self.place(name)

    def siblings(self) -> Iterator[str]:
        """Staging areas of the same output, of this plan and of others."""
        raise NotImplementedError

    def __enter__(self) -> Staging:
        try:
            with writing(self.path):
                self._prepare()
        except BaseException:
            self.discard()
            raise
        return self

    def _prepare(self) -> None:
        missing = os.path.dirname(self.staging)
        while not os.path.exists(missing):
            self._made.append(missing)
            missing = os.path.dirname(missing)
        self._guard = _enter(self.staging, self.path, self.shared)
        # Parts of another plan may be waiting for their end, and who makes parts of this one is not to decide on them.
        for other in self.siblings() if not self.shared else ():
            if other != self.staging:
                _remove_dead(other)

    def finished(self, name: str, size: int) -> Made | None:
        self._files += 1
        found = self._known(name, size)
        return made(found) if found else None

    def _known(self, name: str, size: int) -> dict[str, Any] | None:
        """The record of a file that is as it says."""
        synced = True
        found = _read(self._record_of(name, synced))
        if found is None:
            synced = False
            found = _read(self._record_of(name, synced))
        if found is None or (found["name"], found["size"], found.get("plan")) != (name, size, self.plan_id):
            return None
        for path in (self.place(name), self.final(name)):
            try:
                now = os.stat(path, follow_symlinks=False)
            except OSError:
                continue
            renamed = path != self.place(name)
            if not _is_as_recorded(now, found, synced or self.lenient, renamed):
                return None
            if self.durable and not synced and not self.lenient:
                _sync(path)
                self.confirm(name)
            self._noted.add(name)
            if renamed:
                self._renamed.add(name)
            return found
        return None

    def check(self, name: str, size: int, progress: Callable[[int], None] | None = None) -> bool:
        """Read a finished file again: whether it still has the checksums of its record. If not, that is forgotten.

        `progress` is called with the bytes read since the last call.
        """
        found = self._known(name, size)
        if found is None:
            return False
        with open(self.staged(name), "rb", buffering=0) as file:
            for start, length, crc, _ in found["spans"]:
                if crc is not None and _digest(file.fileno(), start, length) != crc:
                    self._forget(name)
                    return False
                if progress:
                    progress(length)
        return True

    def describe(self, data: bytes) -> None:
        with writing(self.path):
            write_whole(os.path.join(self.staging, DESCRIPTION), data)

    def leave(self) -> None:
        if self.durable and self._guard >= 0:
            sync_directory(self.staging)
        self._release()

    def take_note(self, name: str) -> None:
        self._noted.add(name)

    def elsewhere(self) -> StagedDirectory:
        other = copy.copy(self)
        other._guard, other._writers, other._made = -1, [], []
        other._noted, other._renamed, other._begun = set(), set(), set()
        return other

    def expect(self, size: int) -> None:
        # What is staged and of no use is in the way.
        if not self.shared:
            self._clear(self._noted)
        check_space(self.staging, size)

    def create(self, name: str, size: int) -> Writer:
        place = self.place(name)
        with writing(self.path):
            # Not the staging directory itself: where that is gone, nobody waits for the file any more.
            os.stat(self.staging)
            os.makedirs(os.path.dirname(place), exist_ok=True)
        check_space(self.staging, size)
        self._forget(name)
        writer = LocalWriter(place, size)
        self._begun.add(name)
        self._writers.append(writer)
        return writer

    def note(self, file: FilePlan, crcs: Mapping[str, int] | None) -> None:
        with writing(self.path):
            found = os.stat(self.place(file.name))
            facts: dict[str, Any] = {"plan": self.plan_id, "inode": found.st_ino, "mtime": found.st_mtime_ns}
            write_whole(self._record_of(file.name, False), record(file, crcs, facts | {"boot": _boot()}))
        self._noted.add(file.name)

    def confirm(self, name: str) -> None:
        if self.durable:
            with writing(self.path):
                os.replace(self._record_of(name, False), self._record_of(name, True))

    def _forget(self, name: str) -> None:
        for synced in (False, True):
            with contextlib.suppress(OSError):
                os.unlink(self._record_of(name, synced))

    def _record_of(self, name: str, synced: bool) -> str:
        kind = SYNCED if synced else RECORD
        return os.path.join(self.staging, kind + hashlib.sha256(name.encode()).hexdigest()[:16])

    def publish(self, names: Sequence[str]) -> None:
        """Give the staged files their final names."""
        raise NotImplementedError

    def commit(self, names: Sequence[str]) -> None:
        with writing(self.path):
            self.publish(names)
        self._end()

    def discard(self) -> None:
        if not self.shared:
            self._end()
        elif self._guard >= 0:
            # Others may be at work here.
            for name in self._begun:
                self._forget(name)
                with contextlib.suppress(OSError):
                    os.unlink(self.place(name))
            self._release()
        for path in self._made:
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def keep(self) -> str:
        # One file that could be made again as soon as all is kept only for its part in something larger.
        if not self._noted or (self._files < 2 and not self.shared) or self._guard < 0:
            return ""
        if self.shared:
            for name in self._begun - self._noted:
                with contextlib.suppress(OSError):
                    os.unlink(self.place(name))
        else:
            self._clear(self._noted)
        self._release()
        files = "1 finished file is" if len(self._noted) == 1 else f"{len(self._noted)} finished files are"
        return f"{files} kept in {self.staging}: the same command goes on from there."

    def _clear(self, kept: set[str]) -> None:
        """Remove what is staged, but for the files `kept` and their records."""
        places = {self.place(name) for name in kept}
        places |= {self._record_of(name, synced) for name in kept for synced in (False, True)}
        places |= {os.path.join(self.staging, name) for name in (LOCK, DESCRIPTION)}
        _remove_below(self.staging, places)

    def _end(self) -> None:
        if self._guard >= 0:
            _remove_below(self.staging, {os.path.join(self.staging, LOCK)})
            _remove_emptied(self.staging)
        self._release()

    def _release(self) -> None:
        if self._guard >= 0:
            os.close(self._guard)
            self._guard = -1


class DirectoryStaging(StagedDirectory):
    """A directory of output files, staged in a hidden directory inside it.

    `is_ours(name)` tells which files of an earlier output the new one replaces; `index` is the name that makes an
    output whole: it is removed first and written last, so that a kill in between leaves no index, never a wrong one.
    """

    def __init__(
        self,
        path: str,
        plan_id: str,
        is_ours: Callable[[str], bool],
        index: str,
        durable: bool = True,
        shared: bool = False,
    ) -> None:
        directory = os.path.realpath(path)
        super().__init__(directory, os.path.join(directory, PREFIX + plan_id), plan_id, durable, shared)
        self.index = index
        self.is_ours = is_ours

    def siblings(self) -> Iterator[str]:
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if name.startswith(PREFIX) and os.path.isdir(path):
                yield path

    def publish(self, names: Sequence[str]) -> None:
        previous = [name for name in os.listdir(self.path) if self.is_ours(name) and name not in names]
        if self.index not in self._renamed:
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
            if name not in self._renamed:
                os.replace(self.place(name), self.final(name))
        for old in previous:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, old))
        if self.durable:
            sync_directory(self.path)


class TreeStaging(StagedDirectory):
    """A directory that is published as a whole, with files in directories of its own, and a file beside it after it.

    It grows in a hidden sibling. `marker` is a name inside by which an earlier output is known, which is replaced;
    a directory without it is not. `after` is the name of the file that is put beside the directory at the end.
    """

    def __init__(
        self, path: str, plan_id: str, marker: str, after: str, durable: bool = True, shared: bool = False
    ) -> None:
        path = os.path.realpath(path)
        self.parent, name = os.path.split(path)
        self._prefix = hidden(name)
        super().__init__(path, os.path.join(self.parent, self._prefix + plan_id), plan_id, durable, shared)
        self.old = os.path.join(self.parent, self._prefix + "old")
        self.marker, self.after = marker, after

    def place(self, name: str) -> str:
        return os.path.join(self.staging, *([] if name == self.after else [TREE]), name)

    def final(self, name: str) -> str:
        return os.path.join(self.parent if name == self.after else self.path, name)

    def siblings(self) -> Iterator[str]:
        for name in os.listdir(self.parent):
            path = os.path.join(self.parent, name)
            if name.startswith(self._prefix) and path != self.old and os.path.isdir(path):
                yield path

    def _prepare(self) -> None:
        present = os.listdir(self.path) if os.path.isdir(self.path) else []
        if present and self.marker not in present:
            raise UsageError(
                f"{self.path} holds files of another kind, and would be replaced as a whole. Nothing was written.",
                "Give a directory that does not exist yet.",
            )
        super()._prepare()

    def publish(self, names: Sequence[str]) -> None:
        tree = os.path.join(self.staging, TREE)
        if self.durable:
            for directory, _, _ in os.walk(tree):
                sync_directory(directory)
        inside = [name for name in names if name != self.after]
        if self._renamed.intersection(inside):
            # The tree had its name already when a run before was killed: some small files were made again.
            for name in inside:
                if name not in self._renamed:
                    os.replace(self.place(name), self.final(name))
        else:
            _remove_tree(self.old)
            if os.path.isdir(self.path):
                os.rename(self.path, self.old)
            os.rename(tree, self.path)
        if self.after not in self._renamed:
            os.replace(self.place(self.after), self.final(self.after))
        if self.durable:
            sync_directory(self.parent)
        _remove_tree(self.old)


class FilePartStaging(StagedDirectory):
    """One output file that several processes may have to do with: it grows in a hidden directory beside its place."""

    def __init__(self, path: str, plan_id: str, durable: bool = True, shared: bool = False) -> None:
        path = os.path.realpath(path)
        self.parent, name = os.path.split(path)
        self._prefix = hidden(name)
        super().__init__(path, os.path.join(self.parent, self._prefix + plan_id + PARTS), plan_id, durable, shared)

    def final(self, name: str) -> str:
        return self.path

    def siblings(self) -> Iterator[str]:
        for name in os.listdir(self.parent):
            if name.startswith(self._prefix):
                yield os.path.join(self.parent, name)

    def publish(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._renamed:
                os.replace(self.place(name), self.path)
        if self.durable:
            sync_directory(self.parent)


# ------------------------------------------------------------------------------------------------ staging directories

PREFIX = ".ckptconv-"
LOCK, DESCRIPTION, RECORD, SYNCED = ".lock", ".plan.json", ".record-", ".synced-"
# The tree in a staging directory; what the name of one for a single file ends in.
TREE, PARTS = "tree", "-parts"


def described(path: str) -> Iterator[tuple[str, bytes]]:
    """Staging directories of the output `path` in which parts are, and the descriptions of their plans."""
    path = os.path.realpath(path)
    parent, name = os.path.split(path)
    for directory, prefix in ((path, PREFIX), (parent, hidden(name))):
        with contextlib.suppress(OSError):
            for found in sorted(os.listdir(directory)):
                if found.startswith(prefix):
                    with contextlib.suppress(OSError), open(os.path.join(directory, found, DESCRIPTION), "rb") as file:
                        yield os.path.join(directory, found), file.read()


def _digest(fd: int, start: int, length: int) -> int:
    crc = 0
    for at in range(start, start + length, BLOCK):
        crc = zlib.crc32(os.pread(fd, min(BLOCK, start + length - at), at), crc)
    return crc


def _enter(staging: str, path: str, shared: bool) -> int:
    """Make the directory `staging` where it is not there, and lock it. Raises BusyError if others are in it."""
    guard = os.path.join(staging, LOCK)
    while True:
        os.makedirs(staging, exist_ok=True)
        try:
            fd = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # removed just now
        try:
            lock(fd, path, shared)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(guard)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # whoever removed it had it locked until now


def _remove_dead(path: str) -> None:
    """Remove a staging area, a file or a directory, that no living process has locked."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode):
            if not is_locked(path):
                os.unlink(path)
            return
        guard = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock(guard, path)
            _remove_below(path, {os.path.join(path, LOCK)})
            _remove_emptied(path)
        except BusyError:
            pass
        finally:
            os.close(guard)


def _remove_emptied(staging: str) -> None:
    """Remove a staging directory in which only the lock is left, which is held."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(staging, LOCK))
    with contextlib.suppress(OSError):
        os.rmdir(staging)


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            return read_record(file.read())
    except OSError:
        return None


def _is_as_recorded(now: os.stat_result, found: Mapping[str, Any], synced: bool, renamed: bool) -> bool:
    """Whether a file is still what its record was written for.

    Under its final name it might be another of the same size: the inode tells. What was never synced may be lost since,
    although its size is there, if the machine has started anew.
    """
    if not stat.S_ISREG(now.st_mode) or now.st_size != found["size"]:
        return False
    same = now.st_mtime_ns == found.get("mtime")
    if renamed:
        return same and now.st_ino == found.get("inode")
    return synced or (same and found.get("boot") == _boot() != "")


def _boot() -> str:
    """What tells one start of this machine from every other; "" if that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file so that it is there with all of its content, or not at all.

    It need not be synced: a power cut may take it away or spoil it, which shows, as it is JSON to the last byte.
    """
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)
    os.replace(temporary, path)


def _remove_tree(directory: str) -> None:
    _remove_below(directory)
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _remove_below(directory: str, kept: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Remove everything in a directory of ours but for the files `kept`; links are not followed."""
    for place, directories, files in os.walk(directory, topdown=False):
        for name in files:
            path = os.path.join(place, name)
            if path not in kept:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        for name in directories:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(place, name))
