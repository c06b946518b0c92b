"""The hidden directory in which entries of another one wait to be removed or replaced, its lock and its journal.

It is in that directory, private to the user. An entry leaves by one rename into it, and only if it is the very one that
was looked at. What is in it is no part of the outer directory any more. The journal has the one change that is under
way.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptconv.errors import CorruptError, FailedError, UnsafeError
from ckptconv.features.removal.entries import entries_of, mark_of
from ckptconv.publish.staging.area import LOCK, enter, remove_emptied
from ckptconv.storage.handles import HIDDEN, Handle, resolved
from ckptconv.text import reason

AREA, JOURNAL = f"{HIDDEN}thin", "journal.json"
# The journal while it is written.
_NEW = f"{JOURNAL}.new"
# What is done: all entries are removed, or the only one is replaced by less of it.
REMOVE, LESSEN = "remove", "lessen"
_MOST = 64 << 20
# The names of what is hidden: a journal may come with a directory from elsewhere.
_HIDDEN_NAME = re.compile(r"step-\d+")
_EXCHANGE = 2  # RENAME_EXCHANGE


def hidden_name(part: int) -> str:
    """Return the name in the area of one of the entries that leave together, or of what is to be there instead."""
    return f"step-{part}"


class Change(NamedTuple):
    """What `do` says is done with a step. `moves` has the hidden name of each of its entries, `marks` what `mark_of`
    says of each. `is_done`: all of them are out of the directory, or less of it has its name."""

    step: str
    do: str
    moves: Mapping[str, str]
    marks: Mapping[str, str]
    is_done: bool = False

    def check(self) -> None:
        """Raise ValueError if it moves anything but entries of the directory into the area, TypeError if it is none
        that this program writes."""
        names = [self.step, *self.moves]
        if (
            any(name in ("", ".", "..") or "/" in name for name in names)
            or not all(map(_HIDDEN_NAME.fullmatch, self.moves.values()))
            or self.marks.keys() != self.moves.keys()
            or self.do not in (REMOVE, LESSEN)
            or (self.do == LESSEN and [*self.moves] != [self.step])
        ):
            raise ValueError(self)


class Area:
    """The hidden directory in `home`, locked."""

    def __init__(self, home: Handle, inside: Handle, lock: int) -> None:
        self.home, self.inside, self._lock = home, inside, lock

    @property
    def path(self) -> str:
        return self.inside.path

    def begin(self, change: Change) -> None:
        """Note a change of which nothing is done. Raise UnsafeError if something has one of its hidden names."""
        for hidden in change.moves.values():
            if self.inside.has(hidden):
                raise UnsafeError(f"No journal says what {self.path}/{hidden} is. Nothing was moved.")
        self.note(change)

    def note(self, change: Change) -> None:
        """Write a change to the journal. It is on the disk when this returns."""
        fd = self.inside.open_or_create(_NEW, 0o600)
        try:
            os.ftruncate(fd, 0)
            rest = memoryview(json.dumps(change._asdict()).encode())
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        self.inside.replace(_NEW, self.inside, JOURNAL)
        self.inside.sync()

    def clear(self) -> None:
        """Note that nothing is under way."""
        self.inside.unlink(JOURNAL)
        self.inside.sync()

    def under_way(self) -> Change | None:
        """Return the change of which something may be done; None if there is none. Raise CorruptError for a journal
        that this program does not write."""
        try:
            data = self.inside.read(JOURNAL, _MOST)
            if data is None:
                return None
            change = Change(**json.loads(data))
            change.check()
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise CorruptError(
                f"{self.path}/{JOURNAL} is not valid. Nothing was removed.",
                f"If {AREA} came with a copy of the run, remove it.",
            ) from None
        return change

    def take(self, name: str, mark: str, hidden: str) -> None:
        """Move the entry `name` of the directory to `hidden` in here, if `mark` is what `mark_of` says of it, before
        and after. Raise UnsafeError if it is something else now."""
        check(self.home, name, mark)
        os.rename(name, hidden, src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
        check(self.inside, hidden, mark)
        self.home.sync()

    def give_back(self, name: str, hidden: str) -> None:
        """Give what was taken its name again, unless something else has it by now: then it stays in here."""
        with contextlib.suppress(OSError):
            if not self.home.has(name):
                os.rename(hidden, name, src_dir_fd=self.inside.fd, dst_dir_fd=self.home.fd)

    def swap(self, name: str, mark: str, hidden: str) -> None:
        """Exchange the entry `name` of the directory with `hidden` in here, in one step where the system can. Raise
        UnsafeError if `mark` is not what `mark_of` says of it afterwards; then it gets its name back."""
        if not _exchange(self.home, name, self.inside, hidden):
            os.rename(name, f"{hidden}.old", src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
            self.finish_swap(name, hidden)
        self.home.sync()
        try:
            check(self.inside, hidden, mark)
        except BaseException:
            if _exchange(self.home, name, self.inside, hidden):
                self.remove(hidden)
                self.clear()
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
        """Close it. Remove it, unless an entry is in it: without one, nothing is under way."""
        if {*self.inside.names()} <= {LOCK, JOURNAL, _NEW}:
            remove_emptied(self.home, AREA, self.inside)
        os.close(self._lock)
        self.inside.close()


@contextlib.contextmanager
def entered(path: str) -> Iterator[Area]:
    """Yield the area in the directory at `path`; it is made if it is not there, and removed at the end unless something
    is left in it.

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


def check(home: Handle, name: str, mark: str) -> None:
    """Raise UnsafeError if an entry is not there, or another one than `mark` says."""
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
