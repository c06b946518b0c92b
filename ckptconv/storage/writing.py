"""Writes local files: writers, locks, and free space on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from ckptconv.errors import CkptconvError, FailedError
from ckptconv.storage.handles import Handle, resolved
from ckptconv.storage.marks import mark
from ckptconv.text import format_size, reason

# The disk begins to write a file that is to be synced each time that this many more bytes are in it.
_EARLY = 16 << 20
# The file system reserves room for files of at least so many bytes beforehand: for each write it takes longer.
LARGE = 16 << 20
# Source: linux/fs.h.
SYNC_FILE_RANGE_WRITE = 2


class Writer:
    """A file that is being written. `positioned` writers accept bytes in any order and from several threads, `shared`
    ones from forked processes too."""

    positioned: bool
    shared = False

    def write_at(self, offset: int, data: memoryview) -> None:
        raise NotImplementedError

    def write_runs(self, offsets: Iterable[int], length: int, data: memoryview) -> None:
        """Write `data` in runs of `length` bytes, one at each of `offsets`."""
        for at, offset in enumerate(offsets):
            self.write_at(offset, data[at * length : (at + 1) * length])

    def read_at(self, offset: int, length: int) -> bytes:
        """Return bytes that were written; only for positioned writers."""
        raise NotImplementedError

    def sync(self) -> None:
        """Wait until the written bytes are on the disk."""

    def mark(self, label: str) -> None:
        """Mark the file, which is completely written, with `label`, where that is possible."""

    def close(self) -> None:
        """Finish writing."""


class LocalWriter(Writer):
    """Writes the file `path` of `size` bytes, which is created, or reused if it belongs to this user.

    `directory` is the open directory that contains it; by default the one in its path. `durable`: it is to be synced,
    so the disk begins to write while there is more to come.
    """

    positioned = shared = True

    def __init__(self, path: str, size: int, directory: Handle | None = None, durable: bool = False) -> None:
        self._path, self._begin = path, call("sync_file_range") if durable else None
        self._waiting = 0  # bytes written that the disk may know nothing of
        with writing(path), contextlib.ExitStack() as stack:
            parent = directory or stack.enter_context(Handle.open(os.path.dirname(resolved(path))))
            name = os.path.basename(path)
            self._fd = parent.open_or_create(name)
            try:
                lock(self._fd, path)
                if not self.is_at(parent, name):
                    raise BusyError(path)  # the other process has just given it its final name
                try:
                    os.ftruncate(self._fd, size)
                    if size >= LARGE and (reserve := call("fallocate")):
                        # Where there is no room, or no such thing, the writes will say so.
                        reserve(self._fd, 0, 0, size)
                except OSError:
                    parent.unlink(name)  # this process has it locked, and no other will finish it
                    raise
            except BaseException:
                os.close(self._fd)
                raise

    def is_at(self, directory: Handle, name: str) -> bool:
        """Return whether the file is still at `name` in `directory`."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), directory.stat(name))
        return False

    def write_at(self, offset: int, data: memoryview) -> None:
        with writing(self._path):
            self._waiting += len(data)
            while data:
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count
            if self._begin and self._waiting >= _EARLY:
                self._waiting = 0
                self._begin(self._fd, 0, 0, SYNC_FILE_RANGE_WRITE)

    def write_runs(self, offsets: Iterable[int], length: int, data: memoryview) -> None:
        fd, at = self._fd, 0
        with writing(self._path):
            for offset in offsets:
                count = os.pwrite(fd, data[at : at + length], offset)
                if count != length:
                    self.write_at(offset + count, data[at + count : at + length])
                at += length

    def read_at(self, offset: int, length: int) -> bytes:
        with writing(self._path):
            data = os.pread(self._fd, length, offset)
            while len(data) < length and (more := os.pread(self._fd, length - len(data), offset + len(data))):
                data += more
        return data

    def sync(self) -> None:
        with writing(self._path):
            try:
                os.fsync(self._fd)
            except OSError as error:
                # Some file systems do not support it.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                    raise

    def mark(self, label: str) -> None:
        mark(self._fd, label)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# The types of the arguments of these system calls, after the open file: "l" is 64 bits.
# Source: fallocate(2), sync_file_range(2).
_CALLS = {"fallocate": "ill", "sync_file_range": "lli"}


@functools.cache
def call(name: str) -> Callable[..., object] | None:
    """Return one of `_CALLS`; None where the system has no such call. Its result shows whether it succeeded."""
    try:
        import ctypes

        call = getattr(ctypes.CDLL(None), name)
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    types = {"i": ctypes.c_int, "l": ctypes.c_int64}
    call.argtypes = [ctypes.c_int, *(types[kind] for kind in _CALLS[name])]
    return cast("Callable[..., object]", call)


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn an OSError into a FailedError with advice."""
    try:
        yield
    except CkptconvError:  # some are OSErrors too, about something else than this path
        raise
    except OSError as error:
        hints = {
            errno.ENOSPC: "Free some space, or write elsewhere.",
            errno.EDQUOT: "Your disk quota is exhausted. Free some space, or write elsewhere.",
            errno.EFBIG: "A limit on file sizes is in force (see `ulimit -f`). Use a smaller --max-shard-size.",
            errno.EROFS: "Choose an output on a writable file system.",
            errno.EACCES: "Choose a writable output, or change the permissions.",
            errno.EPERM: "Choose a writable output, or change the permissions.",
            errno.ENOENT: "Create its directory, or choose a directory in which files can be created (not /proc).",
        }
        hint = hints.get(error.errno or 0, "")
        raise FailedError(f"{path} cannot be written: {reason(error)}. It was not published.", hint) from error


class BusyError(FailedError):
    """Another process is writing the file that this one was to write."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is being written by another process.", "Wait for that process to end, or write to another path."
        )


def lock(fd: int, path: str, shared: bool = False) -> None:
    """Lock a staging file for this process, or for several at once if `shared`.

    Raises BusyError if another process has locked it.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(path) from None
    except OSError as error:
        # Some network file systems have no locks; a conversion there is still correct if only one process does it.
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
            raise


def is_locked(fd: int) -> bool:
    """Return whether a living process has the open file `fd` locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def check_space(
    directory: str, size: int, subject: str = "The output", hint: str = "Free some space, or write elsewhere."
) -> None:
    """Raise FailedError, before the first byte, if `size` bytes do not fit into the file system of `directory`."""
    try:
        space = os.statvfs(directory)
    except OSError:
        return
    if (more := size - space.f_bavail * space.f_frsize) > 0:
        needs = f"{subject} needs {format_size(size)}, {format_size(more)} more than is free on {directory}."
        raise FailedError(needs, hint)
