"""The names, locks and records of staging directories."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckptconv.errors import CorruptError, FailedError
from ckptconv.outputs.schema import MOST_DESCRIPTION
from ckptconv.storage.handles import ForeignError, Handle, resolved
from ckptconv.storage.writing import BusyError, is_locked, lock

# Seconds to wait for another conversion that publishes into the same directory: it renames files, no more.
PATIENCE = 60.0


# What hidden siblings of an output end in: the plan, or `BUSY`; something by chance. Earlier releases had `-parts`.
_ENDING = re.compile(r"[0-9A-Za-z]+(-parts|-[0-9a-f]{8})?")


# The bytes of a name that a hidden one repeats: with the rest it is no longer than a file system allows.
_LONGEST = 200


def hidden(name: str) -> str:
    """What the hidden siblings of `name` begin with."""
    data = os.fsencode(name)
    if len(data) > _LONGEST:
        data = data[: _LONGEST - 17] + b"~" + hashlib.sha256(data).hexdigest()[:16].encode()
    return f".{os.fsdecode(data)}.ckptconv-"


def is_sibling(found: str, prefix: str) -> bool:
    """Whether the name `found` is one that we give to hidden siblings that begin with `prefix`."""
    return found.startswith(prefix) and _ENDING.fullmatch(found, len(prefix)) is not None


class Place(NamedTuple):
    """A directory by the names that lead to it from an open one, and a name in it."""

    root: Handle
    above: tuple[str, ...]
    name: str

    @contextlib.contextmanager
    def open(self, make: bool = False) -> Iterator[Handle]:
        with self.root.below(self.above, make) as directory:
            yield directory

    def stat(self) -> os.stat_result | None:
        """What stands there, if anything does."""
        with contextlib.suppress(OSError), self.open() as directory:
            return directory.stat(self.name)
        return None


PREFIX = ".ckptconv-"


LOCK, DESCRIPTION, RECORD = ".lock", ".plan.json", ".record-"


# What a description is called once its output has its final name.
PUBLISHED = ".published.json"


# In a staging directory: the single file of an output, the tree, and the one that this replaces. And what the name of
# the directory ends in that whoever publishes has to itself.
FILE, TREE, OLD, BUSY = "file", "tree", "old", "publishing"


class Described(NamedTuple):
    """A staging directory of an output in parts: where it is, the plan that its name tells, the kinds of output that
    have theirs there, and the description in it. `published`: whoever put the parts together had done so, and was only
    to clean up."""

    place: str
    plan_id: str
    kinds: tuple[str, ...]
    data: bytes
    published: bool


def described(path: str) -> list[Described]:
    """Staging directories of the output `path` in which parts are.

    Raises ForeignError where there are some that are not this user's, and no others, and CorruptError for a
    description that is none.
    """
    path = resolved(path)
    parent, name = os.path.split(path)
    all_found: list[Described] = []
    foreign: list[ForeignError] = []
    for directory, prefix, kinds in ((path, PREFIX, ("directory",)), (parent, hidden(name), ("file", "tree"))):
        with contextlib.suppress(OSError), Handle.open(directory) as home:
            for token in sorted(name for name in home.names() if is_sibling(name, prefix)):
                try:
                    found = list(_description_in(home, token, token[len(prefix) :], kinds))
                except ForeignError as error:
                    foreign.append(error)
                else:
                    all_found.extend(found)
    if foreign and not all_found:
        raise foreign[0]
    return all_found


def _description_in(home: Handle, token: str, plan_id: str, kinds: tuple[str, ...]) -> Iterator[Described]:
    if not stat.S_ISDIR(home.stat(token).st_mode):
        return
    with home.own(token) as staging:
        for name in (DESCRIPTION, PUBLISHED):
            try:
                data = staging.read(name, MOST_DESCRIPTION)
            except ValueError as error:
                raise CorruptError(
                    f"{os.path.join(staging.path, name)} is not the description of parts: {error}.",
                    "Run one of the parts again, which writes it anew.",
                ) from None
            if data is not None:
                yield Described(staging.path, plan_id, kinds, data, name == PUBLISHED)
                return


def record_of(name: str) -> str:
    """The name of the record of the file `name`."""
    return RECORD + hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def allocated(directory: Handle, name: str) -> int:
    """How many bytes of the disk the file `name` has already."""
    with contextlib.suppress(OSError):
        return directory.stat(name).st_blocks * 512
    return 0


def enter(home: Handle, name: str, path: str, shared: bool) -> tuple[Handle, int]:
    """The directory `name` of ours, made where it is not there, and its lock.

    Raises BusyError if others are in it, and ForeignError where something else stands there: a directory of ours is
    empty, or has our lock.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            home.make_private(name)
        # What is removed just now is made again.
        with contextlib.suppress(FileNotFoundError):
            staging = home.own(name)
            try:
                present = staging.names()
                if present and LOCK not in present:
                    raise ForeignError(staging.path, "a directory that has no lock of ours")
                guard = staging.open_or_create(LOCK, 0o600)
                try:
                    lock(guard, path, shared)
                    # Whoever removed it had it locked until now.
                    if os.path.samestat(os.fstat(guard), staging.stat(LOCK)):
                        return staging, guard
                except BaseException:
                    os.close(guard)
                    raise
                os.close(guard)
            except BaseException:
                staging.close()
                raise
            staging.close()


def wait_for(home: Handle, name: str, path: str) -> tuple[Handle, int]:
    """As `enter`, when no other process is in it any more. Raises FailedError where that takes too long."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return enter(home, name, path, shared=False)
        except BusyError:
            if time.monotonic() > until:
                raise FailedError(
                    f"{path} was being published by another process for {PATIENCE:.0f} seconds. It was left as it is.",
                    "Run it again when that has ended.",
                ) from None
        time.sleep(0.02)


def remove_dead(home: Handle, name: str, recover: Callable[[Handle], None] | None = None) -> None:
    """Remove a staging area, a file or a directory, that is this user's and that no living process has locked.

    A directory without our lock in it is only removed if it is empty. `recover` is called with it before.
    """
    with contextlib.suppress(OSError, FailedError):
        if not stat.S_ISDIR(home.stat(name).st_mode):
            fd = home.open_own(name)
            try:
                if not is_locked(fd) and os.path.samestat(os.fstat(fd), home.stat(name)):
                    home.unlink(name)
            finally:
                os.close(fd)
            return
        with home.own(name) as staging:
            try:
                guard = staging.open_own(LOCK)
            except FileNotFoundError:
                os.rmdir(name, dir_fd=home.fd)
                return
            try:
                lock(guard, name)
                if recover:
                    recover(staging)
                remove_emptied(home, name, staging)
            finally:
                os.close(guard)


def remove_emptied(home: Handle, name: str, staging: Handle) -> None:
    """Remove a staging directory, whose lock is held: last what says that it is one of ours."""
    staging.clear({LOCK, PUBLISHED})
    for last in (PUBLISHED, LOCK):
        with contextlib.suppress(OSError):
            staging.unlink(last)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=home.fd)
