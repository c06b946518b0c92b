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
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, FailedError, UnsafeError
from ckptconv.publish.staging.area import LOCK, enter, remove_emptied
from ckptconv.storage.handles import HIDDEN, Handle, resolved
from ckptconv.storage.reading import Entry
from ckptconv.text import reason

AREA, JOURNAL = f"{HIDDEN}thin", "journal.jsonl"
# What is done with a step; and what the journal says of it then: that all its names are out of the run, or that less of
# it has its name; that nothing of it is hidden any more.
REMOVE, LESSEN = "remove", "lessen"
DONE, CLEARED = "done", "cleared"
# The most bytes of a journal that are read, and how deep the files of a step lie at most.
_MOST, _DEEPEST = 256 << 20, 32
# The names of what is hidden, as `hidden_name` makes them: a journal may come with a run from elsewhere.
_HIDDEN_NAME = re.compile(r"step-\d+-\d+")
_EXCHANGE = 2  # RENAME_EXCHANGE
LINKS = "has links in it"


def hidden_name(number: int, part: int = 0) -> str:
    """Return the name in the area of one of the names of a step, or of what is to be there instead."""
    return f"step-{number}-{part}"


class Begun(NamedTuple):
    """A step that leaves the run, or is replaced by less of it: `do` says which. `moves` has the hidden name of each of
    its names in the run, `marks` what `mark_of` says of each."""

    step: str
    do: str
    moves: Mapping[str, str]
    marks: Mapping[str, str]


class Area:
    """The hidden directory of the run `home`, locked."""

    def __init__(self, home: Handle, inside: Handle, lock: int) -> None:
        self.home, self.inside, self._lock = home, inside, lock

    @property
    def path(self) -> str:
        return self.inside.path

    def begin(self, begun: Begun) -> None:
        """Note in the journal what is about to be done."""
        self._append(begun._asdict())

    def note(self, step: str, state: str) -> None:
        """Note in the journal how far a step is."""
        self._append({"step": step, "state": state})

    def _append(self, record: Mapping[str, Any]) -> None:
        """Append a line to the journal. It is on the disk when this returns."""
        fd = self.inside.open_or_create(JOURNAL, 0o600)
        try:
            os.lseek(fd, 0, os.SEEK_END)
            rest = memoryview(json.dumps(record).encode() + b"\n")
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def unfinished(self) -> list[tuple[Begun, bool]]:
        """Return the steps of which something may be hidden, each with whether it is `DONE`. A last line that was cut
        short is left out. Raise CorruptError for a journal that has other lines than this program writes."""
        name = f"{self.path}/{JOURNAL}"
        try:
            data = self.inside.read(JOURNAL, _MOST) or b""
        except ValueError as error:
            raise CorruptError(f"{name}: {error}.") from None
        steps: dict[str, tuple[Begun, bool]] = {}
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            try:
                record = json.loads(line)
                begun = _parsed(record) if "do" in record else None
                step, state = record["step"], begun or record["state"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise CorruptError(
                    f"{name}: line {number} is not valid. Nothing was removed.",
                    f"If {AREA} came with a copy of the run, remove it.",
                ) from None
            if begun:
                steps[step] = begun, False
            elif state == CLEARED:
                steps.pop(step, None)
            elif state == DONE and step in steps:
                steps[step] = steps[step][0], True
        return [*steps.values()]

    def check(self, hidden: str, mark: str) -> None:
        """Raise UnsafeError if an entry in here is another one than `mark` says."""
        _check(self.inside, hidden, mark)

    def take(self, name: str, mark: str, hidden: str) -> None:
        """Move the entry `name` of the run to `hidden` in here, if `mark` is what `mark_of` says of it, before and
        after. Raise UnsafeError if it is something else now; then it has its name."""
        _check(self.home, name, mark)
        os.rename(name, hidden, src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
        try:
            self.check(hidden, mark)
        except BaseException:
            # Nobody can have put anything in its place who did not win the race again: then it stays in here.
            with contextlib.suppress(OSError):
                if not self.home.has(name):
                    os.rename(hidden, name, src_dir_fd=self.inside.fd, dst_dir_fd=self.home.fd)
            raise
        self.home.sync()

    def swap(self, name: str, mark: str, hidden: str) -> None:
        """Exchange the entry `name` of the run with `hidden` in here, in one step where the system can."""
        _check(self.home, name, mark)
        if not _exchange(self.home, name, self.inside, hidden):
            os.rename(name, f"{hidden}.old", src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
            self.finish_swap(name, hidden)
        self.home.sync()
        try:
            self.check(hidden, mark)
        except BaseException:
            _exchange(self.home, name, self.inside, hidden)
            raise

    def finish_swap(self, name: str, hidden: str) -> None:
        """Finish an exchange that was cut short where the system has none: give `name` what it is to be."""
        old = f"{hidden}.old"
        if not self.inside.has(old):
            return
        if not self.home.has(name):
            os.rename(hidden, name, src_dir_fd=self.inside.fd, dst_dir_fd=self.home.fd)
        os.rename(old, hidden, src_dir_fd=self.inside.fd, dst_dir_fd=self.inside.fd)

    def remove(self, hidden: str) -> None:
        """Remove an entry in here, with all that is in it. Raise FailedError if something of it cannot be removed."""
        if not self.inside.has(hidden):
            return
        try:
            if stat.S_ISDIR(self.inside.stat(hidden).st_mode):
                with self.inside.inside(hidden) as inner:
                    inner.clear()
                os.rmdir(hidden, dir_fd=self.inside.fd)
            else:
                self.inside.unlink(hidden)
        except OSError as error:
            raise FailedError(f"{self.path}/{hidden} cannot be removed: {reason(error)}.") from error

    def close(self) -> None:
        """Close it. Remove it, unless a step is in it."""
        if {*self.inside.names()} <= {LOCK, JOURNAL}:
            remove_emptied(self.home, AREA, self.inside)
        os.close(self._lock)
        self.inside.close()


def _parsed(record: Mapping[str, Any]) -> Begun:
    """Return the step that a line of the journal begins. Raise ValueError if it moves anything but entries of the run
    into the area, TypeError or KeyError if it is nothing that `Area.begin` writes."""
    begun = Begun(record["step"], record["do"], dict(record["moves"]), dict(record["marks"]))
    names = [begun.step, *begun.moves]
    if (
        any(name in ("", ".", "..") or "/" in name for name in names)
        or not all(map(_HIDDEN_NAME.fullmatch, begun.moves.values()))
        or begun.marks.keys() != begun.moves.keys()
        or (begun.do == LESSEN and [*begun.moves] != [begun.step])
    ):
        raise ValueError(begun)
    return begun


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
            inside, lock = enter(home, AREA, os.path.join(path, AREA), shared=False)
        except OSError as error:
            raise FailedError(f"{path}: {AREA} cannot be made: {reason(error)}.") from error
        area = Area(home, inside, lock)
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
    entries: dict[str, os.stat_result] = {}
    _walk(home, name, "", os.fstat(home.fd).st_dev, entries, _DEEPEST)
    return entries


def _walk(place: Handle, name: str, prefix: str, device: int, entries: dict[str, os.stat_result], deepest: int) -> None:
    entry, path = place.stat(name), f"{prefix}{name}"
    if stat.S_ISLNK(entry.st_mode):
        raise StrangeError(os.path.join(place.path, name), LINKS)
    if entry.st_dev != device or not deepest:
        raise StrangeError(os.path.join(place.path, name), "lies on another disk, or too deep")
    entries[path] = entry
    if stat.S_ISDIR(entry.st_mode):
        with place.inside(name) as inner:
            entries[path] = entry = os.fstat(inner.fd)
            if entry.st_dev != device:
                raise StrangeError(inner.path, "lies on another disk, or too deep")
            for below in inner.names():
                _walk(inner, below, f"{path}/", device, entries, deepest - 1)
    elif not stat.S_ISREG(entry.st_mode):
        raise StrangeError(os.path.join(place.path, name), "has more than files in it")


def mark_of(entries: Mapping[str, os.stat_result]) -> str:
    """Return what tells an entry of a run from any other, and from itself with other contents: who it is on the disk,
    and the sizes and times of all files in it."""
    start = len(next(iter(entries)))
    lines = [
        f"{path[start:]} {entry.st_dev} {entry.st_ino} {(entry.st_size, entry.st_mtime_ns) if _is_file(entry) else 0}\n"
        for path, entry in sorted(entries.items())
    ]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def agrees(entries: Mapping[str, os.stat_result], judged: Mapping[str, Entry]) -> bool:
    """Whether the files among the entries of a step are those that were judged: their names, sizes and times."""
    files = {path: entry for path, entry in entries.items() if _is_file(entry)}
    return files.keys() == judged.keys() and all(
        (file.st_size, file.st_mtime) == (judged[path].file.size, judged[path].time) for path, file in files.items()
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
