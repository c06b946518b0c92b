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

from ckptconv.errors import FailedError
from ckptconv.storage.handles import HIDDEN, ForeignError, Handle
from ckptconv.storage.writing import BusyError, is_locked, lock

# Seconds to wait for another conversion that publishes into the same directory; it only renames files.
PATIENCE = 60.0


# The endings of names of hidden siblings of an output: the plan id, or `BUSY`, then perhaps a random suffix. Earlier
# releases appended `-parts`.
_ENDING = re.compile(r"[0-9A-Za-z]+(-parts|-[0-9a-f]{8})?")


# The most bytes of a record that are read: it has a line for every tensor of a file.
MOST_RECORD = 256 << 20
# Bytes of the output's name to repeat in a hidden name; with the rest it stays within the limits of file systems.
_LONGEST = 200


def hidden(name: str) -> str:
    """Return the prefix of the hidden siblings of `name`."""
    data = os.fsencode(name)
    if len(data) > _LONGEST:
        data = data[: _LONGEST - 17] + b"~" + hashlib.sha256(data).hexdigest()[:16].encode()
    return f".{os.fsdecode(data)}{HIDDEN}"


def is_sibling(name: str, prefix: str) -> bool:
    """Return whether this program gives `name` to hidden siblings with the prefix `prefix`."""
    return name.startswith(prefix) and _ENDING.fullmatch(name, len(prefix)) is not None


class Place(NamedTuple):
    """A name in a directory, which is reached from an open directory by the names `above`."""

    root: Handle
    above: tuple[str, ...]
    name: str

    @contextlib.contextmanager
    def open(self, make: bool = False) -> Iterator[Handle]:
        with self.root.descend(self.above, make) as directory:
            yield directory

    def stat(self) -> os.stat_result | None:
        """Return the stat of the entry at this place, None if there is none."""
        with contextlib.suppress(OSError), self.open() as directory:
            return directory.stat(self.name)
        return None


LOCK, DESCRIPTION, RECORD = ".lock", ".plan.json", ".record-"


# The name of the description once its output has its final name.
PUBLISHED = ".published.json"


# The name of the single file of an output in a staging directory. `BUSY` ends the name of the directory that a process
# holds alone while it publishes.
FILE, BUSY = "file", "publishing"


def record_of(name: str) -> str:
    """Return the name of the record of the file `name`."""
    return RECORD + hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def allocated(directory: Handle, name: str) -> int:
    """Return how many bytes of disk the file `name` already occupies."""
    with contextlib.suppress(OSError):
        return directory.stat(name).st_blocks * 512
    return 0


def enter(home: Handle, name: str, path: str, shared: bool) -> tuple[Handle, int]:
    """Open and lock our directory `name`, creating it if it does not exist. Return it and the lock's descriptor.

    Raises BusyError if another process holds the lock, and ForeignError if something else has that name: a directory of
    ours is empty or has our lock.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            home.make_private(name)
        try:
            staging = home.private(name)
            try:
                present = staging.names()
                if present and LOCK not in present:
                    raise ForeignError(staging.path, "a directory without a lock of ckptconv")
                guard = staging.open_or_create(LOCK, 0o600)
                try:
                    lock(guard, path, shared)
                    # A process that removes the directory holds its lock until then, so check that the lock file still
                    # exists.
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
        except FileNotFoundError:
            # Another process removed the directory meanwhile: create it again.
            continue


def wait_for(home: Handle, name: str, path: str) -> tuple[Handle, int]:
    """Do as `enter`, but wait until no other process is in it. Raises FailedError after `PATIENCE` seconds."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return enter(home, name, path, shared=False)
        except BusyError:
            if time.monotonic() > until:
                raise FailedError(
                    f"{path} was still being published by another process after {PATIENCE:.0f} seconds. It was not "
                    "changed.",
                    "Run the command again when that process has ended.",
                ) from None
        time.sleep(0.02)


def remove_dead(home: Handle, name: str, recover: Callable[[Handle], None] | None = None) -> None:
    """Remove a staging file or directory that belongs to this user and that no living process has locked.

    A directory without our lock in it is removed only if empty. `recover` is called with the directory first.
    """
    with contextlib.suppress(OSError, FailedError):
        if not stat.S_ISDIR(home.stat(name).st_mode):
            fd = home.open_private(name)
            try:
                if not is_locked(fd) and os.path.samestat(os.fstat(fd), home.stat(name)):
                    home.unlink(name)
            finally:
                os.close(fd)
            return
        with home.private(name) as staging:
            try:
                guard = staging.open_private(LOCK)
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
    """Remove a staging directory whose lock is held. What identifies it as ours is removed last."""
    staging.clear({LOCK, PUBLISHED})
    for last in (PUBLISHED, LOCK):
        with contextlib.suppress(OSError):
            staging.unlink(last)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=home.fd)
