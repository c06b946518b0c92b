"""The hidden directory in which steps of a run wait to be removed or replaced, its lock and its journal.

It is in the directory of the run, private to the user, and all that is done goes by open directories: a name that
others replace meanwhile redirects nothing. A step leaves the run by one rename into it, and only if it is the very
directory that was looked at. What is in it is no part of the run any more.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CorruptError, FailedError, UnsafeError
from ckptconv.publish.staging.area import LOCK, enter, remove_emptied
from ckptconv.storage.handles import HIDDEN, Handle, resolved
from ckptconv.storage.reading import Entry
from ckptconv.text import reason

AREA, JOURNAL = f"{HIDDEN}thin", "journal.jsonl"
# The most bytes of a journal that are read, and how deep the files of a step lie at most.
_MOST, _DEEPEST = 256 << 20, 32
_EXCHANGE = 2  # RENAME_EXCHANGE
LINKS = "has links in it"


class Area:
    """The hidden directory of the run `home`, locked."""

    def __init__(self, home: Handle, inside: Handle, held: int) -> None:
        self.home, self.inside, self._held = home, inside, held

    @property
    def path(self) -> str:
        return self.inside.path

    def note(self, **told: Any) -> None:
        """Append a line to the journal. It is on the disk when this returns."""
        fd = self.inside.open_or_create(JOURNAL, 0o600)
        try:
            os.lseek(fd, 0, os.SEEK_END)
            rest = memoryview(json.dumps(told).encode() + b"\n")
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def journal(self) -> list[dict[str, Any]]:
        """Return the lines of the journal; a last one that was cut short is left out."""
        try:
            data = self.inside.read(JOURNAL, _MOST) or b""
        except ValueError as error:
            raise CorruptError(f"{self.path}/{JOURNAL}: {error}.") from None
        lines = []
        for line in data.split(b"\n")[:-1]:
            try:
                told = json.loads(line)
            except (ValueError, RecursionError):
                raise CorruptError(f"{self.path}/{JOURNAL} has a line that is no JSON.") from None
            if isinstance(told, dict):
                lines.append(told)
        return lines

    def take(self, name: str, mark: str, into: str) -> None:
        """Move the entry `name` of the run to `into` in here, if `mark` is what `mark_of` says of it, before and after.

        Raise UnsafeError if it is something else now; then it has its name.
        """
        _check(self.home, name, mark)
        os.rename(name, into, src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
        try:
            _check(self.inside, into, mark)
        except BaseException:
            # Nobody can have put anything in its place who did not win the race again: then it stays in here.
            with contextlib.suppress(OSError):
                if not self.home.has(name):
                    os.rename(into, name, src_dir_fd=self.inside.fd, dst_dir_fd=self.home.fd)
            raise
        self.home.sync()

    def swap(self, name: str, mark: str, new: str) -> None:
        """Exchange the entry `name` of the run with `new` in here, in one step where the system can."""
        _check(self.home, name, mark)
        if not _exchange(self.home, name, self.inside, new):
            aside = f"{new}.old"
            os.rename(name, aside, src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
            os.rename(new, name, src_dir_fd=self.inside.fd, dst_dir_fd=self.home.fd)
            os.rename(aside, new, src_dir_fd=self.inside.fd, dst_dir_fd=self.inside.fd)
        self.home.sync()
        try:
            _check(self.inside, new, mark)
        except BaseException:
            _exchange(self.home, name, self.inside, new)
            raise

    def finish_swap(self, name: str, new: str) -> None:
        """Finish an exchange that was cut short where the system has none: give `name` what it is to be."""
        aside = f"{new}.old"
        if not self.inside.has(aside):
            return
        if not self.home.has(name):
            os.rename(new, name, src_dir_fd=self.inside.fd, dst_dir_fd=self.home.fd)
        os.rename(aside, new, src_dir_fd=self.inside.fd, dst_dir_fd=self.inside.fd)

    def remove(self, name: str) -> None:
        """Remove an entry in here, with all that is in it. Raise FailedError if something of it cannot be removed."""
        if not self.inside.has(name):
            return
        try:
            if stat.S_ISDIR(self.inside.stat(name).st_mode):
                with self.inside.inside(name) as inner:
                    inner.clear()
                os.rmdir(name, dir_fd=self.inside.fd)
            else:
                self.inside.unlink(name)
        except OSError as error:
            raise FailedError(f"{self.path}/{name} cannot be removed: {reason(error)}.") from error

    def close(self) -> None:
        """Close it. Remove it, unless a step is in it."""
        if {*self.inside.names()} <= {LOCK, JOURNAL}:
            remove_emptied(self.home, AREA, self.inside)
        os.close(self._held)
        self.inside.close()


@contextlib.contextmanager
def entered(path: str) -> Iterator[Area]:
    """Yield the area in the directory of the run at `path`; it is made if it is not there, and removed at the end
    unless something is left in it.

    Raise BusyError if another process has it, ForeignError if it is not this user's.
    """
    path = resolved(path)
    try:
        home = Handle.open(path)
    except OSError as error:
        raise FailedError(f"{path} cannot be opened: {reason(error)}.") from error
    with home:
        try:
            inside, held = enter(home, AREA, os.path.join(path, AREA), shared=False)
        except OSError as error:
            raise FailedError(f"{path}: {AREA} cannot be made: {reason(error)}.") from error
        area = Area(home, inside, held)
        try:
            yield area
        finally:
            area.close()


# ----------------------------------------------------------------------------------------------- what an entry is


class StrangeError(UnsafeError):
    """A step has something in it that is never removed: `why` says what."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}. It was left alone.")
        self.why = why


def entries_of(home: Handle, name: str) -> dict[str, os.stat_result]:
    """Return all directories and files of the entry `name` of a run, itself among them, by their paths in the run.

    Raise StrangeError if there is anything else among them, or another file system.
    """
    found: dict[str, os.stat_result] = {}
    _walk(home, name, "", os.fstat(home.fd).st_dev, found, _DEEPEST)
    return found


def _walk(place: Handle, name: str, prefix: str, device: int, found: dict[str, os.stat_result], deepest: int) -> None:
    entry, path = place.stat(name), f"{prefix}{name}"
    if stat.S_ISLNK(entry.st_mode):
        raise StrangeError(os.path.join(place.path, name), LINKS)
    if entry.st_dev != device or not deepest:
        raise StrangeError(os.path.join(place.path, name), "lies on another disk, or too deep")
    found[path] = entry
    if stat.S_ISDIR(entry.st_mode):
        with place.inside(name) as inner:
            found[path] = entry = os.fstat(inner.fd)
            if entry.st_dev != device:
                raise StrangeError(inner.path, "lies on another disk, or too deep")
            for each in inner.names():
                _walk(inner, each, f"{path}/", device, found, deepest - 1)
    elif not stat.S_ISREG(entry.st_mode):
        raise StrangeError(os.path.join(place.path, name), "has more than files in it")


def mark_of(entries: Mapping[str, os.stat_result]) -> str:
    """Return what tells an entry of a run from any other, and from itself with other contents: who it is on the disk,
    and the sizes and times of all files in it."""
    start = len(next(iter(entries)))
    lines = [
        f"{path[start:]} {each.st_dev} {each.st_ino} {(each.st_size, each.st_mtime_ns) if _is_file(each) else 0}\n"
        for path, each in sorted(entries.items())
    ]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def agrees(entries: Mapping[str, os.stat_result], judged: Mapping[str, Entry]) -> bool:
    """Whether the files among the entries of a step are those that were judged: their names, sizes and times."""
    files = {path: each for path, each in entries.items() if _is_file(each)}
    return files.keys() == judged.keys() and all(
        (each.st_size, each.st_mtime) == (judged[path].file.size, judged[path].time) for path, each in files.items()
    )


def _is_file(entry: os.stat_result) -> bool:
    return stat.S_ISREG(entry.st_mode)


def _check(home: Handle, name: str, mark: str) -> None:
    try:
        now = mark_of(entries_of(home, name))
    except OSError as error:
        raise UnsafeError(f"{home.path}/{name} is not there any more: {reason(error)}.") from error
    if now != mark:
        raise UnsafeError(f"{home.path}/{name} has changed since it was looked at. It was left alone.")


def _exchange(one: Handle, name: str, other: Handle, new: str) -> bool:
    """Exchange two entries in one step. Return whether the system could."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(one.fd, os.fsencode(name), other.fd, os.fsencode(new), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), name)
