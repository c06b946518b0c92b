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
from ckptconv.features.removal.entries import entries_of, is_entry, mark_of
from ckptconv.publish.staging.area import LOCK, enter, is_sibling, remove_emptied
from ckptconv.publish.staging.area import hidden as sibling_of
from ckptconv.storage.handles import HIDDEN, Handle, resolved
from ckptconv.text import reason, some

# The journal has another name once its change is done: a full disk has room for that.
AREA, JOURNAL, DONE = f"{HIDDEN}thin", "journal.json", "done.json"
# The journal while it is written.
_NEW = f"{JOURNAL}.new"
_OWN = frozenset({LOCK, JOURNAL, DONE, _NEW})
# The kinds of change: remove all entries, or replace the only one by less of it.
REMOVE, LESSEN = "remove", "lessen"
_MOST = 64 << 20
# The names of hidden entries: a journal may come with a directory from elsewhere.
_HIDDEN_NAME = re.compile(r"step-\d+")
# RENAME_NOREPLACE, RENAME_EXCHANGE
_NO_REPLACE, _EXCHANGE = 1, 2
# Advice on an entry that no journal describes.
ADVICE = "Move the contents that you want to keep to another place, and remove the rest."


def hidden_name(part: int) -> str:
    """Return the name in the area of one of the entries that leave together, or of their replacement."""
    return f"step-{part}"


class Change(NamedTuple):
    """One change of the journal: the action `do` on a `step`. `moves` has the hidden name of each of its entries,
    `marks` the mark (`mark_of`) of each."""

    step: str
    do: str
    moves: Mapping[str, str]
    marks: Mapping[str, str]

    def check(self) -> None:
        """Raise ValueError if it moves anything but entries of the directory into the area, TypeError if it is none
        that this program writes."""
        names = [*map(os.fsencode, (self.step, *self.moves))]
        if (
            any(name in (b"", b".", b"..") or b"/" in name or b"\0" in name for name in names)
            or not all(map(_HIDDEN_NAME.fullmatch, self.moves.values()))
            or self.marks.keys() != self.moves.keys()
            or not all(isinstance(mark, str) for mark in self.marks.values())
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
        """Write a change that has not begun to the journal. It is on the disk when this returns. Raise UnsafeError if
        something has one of its hidden names."""
        for hidden in change.moves.values():
            if self.inside.has(hidden):
                raise UnsafeError(f"No journal describes {self.path}/{hidden}. Nothing was moved.", ADVICE)
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

    def done(self) -> None:
        """Note that all entries of a change are in here, or that less of the only one has its name."""
        if self.inside.has(JOURNAL):
            os.rename(JOURNAL, DONE, src_dir_fd=self.inside.fd, dst_dir_fd=self.inside.fd)
        self.inside.sync()

    def clear(self) -> None:
        """Note that nothing is under way."""
        for journal in (JOURNAL, DONE):
            self.inside.unlink(journal)
        self.inside.sync()

    def under_way(self) -> tuple[Change, bool] | None:
        """Return the change of which something may be hidden, with whether it is done; None if there is none. Raise
        CorruptError for a journal that this program does not write."""
        for journal in (DONE, JOURNAL):
            if self.inside.has(journal):
                try:
                    return _parsed(self.inside, journal), journal == DONE
                except (ValueError, TypeError, AttributeError, RecursionError):
                    raise CorruptError(
                        f"{self.path}/{journal} is not valid. Nothing was removed.",
                        f"If {AREA} came with a copy of the run, remove it.",
                    ) from None
        return None

    def take(self, name: str, mark: str, hidden: str) -> None:
        """Move the entry `name` of the directory to `hidden` in here, if `mark` is what `mark_of` says of it, before
        and after. Raise UnsafeError if it is something else now."""
        check(self.home, name, mark)
        os.rename(name, hidden, src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
        check(self.inside, hidden, mark)
        self.home.sync()

    def give_back(self, moves: Mapping[str, str]) -> None:
        """Give moved entries their names again. Raise UnsafeError if something else has one by now: then its owner
        stays in here."""
        for name, hidden in moves.items():
            if self.inside.has(hidden):
                try:
                    _rename(self.inside, hidden, self.home, name)
                except OSError as error:
                    raise UnsafeError(
                        f"{self.path}/{hidden} cannot be renamed back to {name}: {reason(error)}.", ADVICE
                    ) from error
        self.home.sync()

    def swap(self, name: str, mark: str, hidden: str) -> None:
        """Exchange the entry `name` of the directory with `hidden` in here, in one step where the system can. Raise
        UnsafeError if `mark` is not what `mark_of` says of it afterwards; then it gets its name back."""
        new = mark_of(entries_of(self.inside, hidden))
        if not _renamed(self.home, name, self.inside, hidden, _EXCHANGE):
            os.rename(name, f"{hidden}.old", src_dir_fd=self.home.fd, dst_dir_fd=self.inside.fd)
            self.finish_swap(name, hidden)
        self.home.sync()
        try:
            check(self.inside, hidden, mark)
        except BaseException:
            is_back = _renamed(self.home, name, self.inside, hidden, _EXCHANGE)
            # An entry that another user put there meanwhile is not removed.
            if is_back and is_entry(self.inside, hidden, new):
                self.remove(hidden)
                self.clear()
            raise

    def finish_swap(self, name: str, hidden: str) -> None:
        """Finish an exchange that was cut short where the system has none: give `name` the new entry. Raise UnsafeError
        if something else has that name by now."""
        old = f"{hidden}.old"
        if not self.inside.has(old):
            return
        if self.inside.has(hidden):
            try:
                _rename(self.inside, hidden, self.home, name)
            except FileExistsError:
                raise UnsafeError(
                    f"{self.home.path}/{name} has been replaced by something else. Its former content is in "
                    f"{self.path}/{old}.",
                    ADVICE,
                ) from None
        os.rename(old, hidden, src_dir_fd=self.inside.fd, dst_dir_fd=self.inside.fd)

    def remove(self, hidden: str) -> None:
        """Remove an entry in here, with all that is in it, and what was staged for it. Raise FailedError if something
        of it cannot be removed."""
        for name in self.inside.names():
            if name == hidden or is_sibling(name, sibling_of(hidden)):
                try:
                    self._remove(name)
                except OSError as error:
                    raise FailedError(f"{self.path}/{name} cannot be removed: {reason(error)}.", ADVICE) from error

    def _remove(self, name: str) -> None:
        if stat.S_ISDIR(self.inside.stat(name).st_mode):
            with self.inside.inside(name) as inner:
                inner.clear()
            os.rmdir(name, dir_fd=self.inside.fd)
        else:
            self.inside.unlink(name)

    def close(self) -> None:
        """Close it. Remove it, unless an entry or a journal is in it: without these, nothing is under way."""
        if {*self.inside.names()} <= {LOCK, _NEW}:
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
            raise FailedError(f"{path}: {AREA} cannot be created: {reason(error)}.") from error
        area = Area(home, inside, lock)
        try:
            yield area
        finally:
            area.close()


def _parsed(inside: Handle, journal: str) -> Change:
    """Return the change in a journal. Raise ValueError, TypeError or AttributeError if it is none."""
    change = Change(**json.loads(inside.read(journal, _MOST) or b""))
    change.check()
    return change


def check(home: Handle, name: str, mark: str) -> None:
    """Raise UnsafeError if an entry is not there, or another one than `mark` says."""
    try:
        now = mark_of(entries_of(home, name))
    except OSError as error:
        raise UnsafeError(f"{home.path}/{name} no longer exists: {reason(error)}.") from error
    if now != mark:
        raise UnsafeError(f"{home.path}/{name} has changed since it was checked. It was left in place.")


def warnings(path: str) -> Iterator[str]:
    """Yield warnings about the area in the directory at `path`, if there is one: that no journal describes its
    contents, as where an older release left it, or that a change is under way."""
    area = os.path.join(path, AREA)
    if not os.path.lexists(area):
        return
    try:
        with Handle.open(area) as inside:
            journals = [journal for journal in (JOURNAL, DONE) if inside.has(journal)]
            moves = [name for journal in journals for name in _parsed(inside, journal).moves.values()]
            staged = tuple(map(sibling_of, moves))
            told = {*_OWN, *moves, *(f"{name}.old" for name in moves)}
            unknown = [name for name in inside.names() if name not in told and not name.startswith(staged)]
    except (OSError, FailedError, ValueError, TypeError, AttributeError, RecursionError):
        yield f"{area} cannot be read. It may contain steps that an interrupted run of thin moved there."
        return
    if unknown:
        yield (
            f"{area} contains entries that no journal describes: {some(sorted(unknown), form=str)}. Another release "
            f"may have left them there. ckptconv neither uses nor removes them. {ADVICE}"
        )
    if journals or not unknown:
        yield (
            f"{area} exists: a run of thin is active, or was interrupted. The next run with --yes completes an "
            "interrupted one."
        )


def _rename(one: Handle, name: str, other: Handle, new: str) -> None:
    """Rename an entry. Raise FileExistsError if something has the new name."""
    if not _renamed(one, name, other, new, _NO_REPLACE):
        if other.has(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        os.rename(name, new, src_dir_fd=one.fd, dst_dir_fd=other.fd)


def _renamed(one: Handle, name: str, other: Handle, new: str, how: int) -> bool:
    """Rename an entry without replacing another one, or exchange the two, in one step. Return whether the system
    could."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(one.fd, os.fsencode(name), other.fd, os.fsencode(new), how) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), name)
