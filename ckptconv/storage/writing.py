"""Writes local files: writers, locks, fsync, and free space on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from queue import Queue

from ckptconv.errors import FailedError
from ckptconv.process import Thread, start_threads
from ckptconv.storage.handles import Handle, resolved


def reason(error: OSError) -> str:
    """Return the operating system's message, without its number and path."""
    return (error.strerror or str(error) or type(error).__name__).lower()


class Writer:
    """A file that is being written. `positioned` writers accept bytes in any order and from several threads."""

    positioned: bool

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

    def close(self) -> None:
        """Finish writing."""


class LocalWriter(Writer):
    """Writes the file `path` of `size` bytes, which is created, or reused if it belongs to this user.

    `directory` is the open directory that contains it; by default the one in its path.
    """

    positioned = True

    def __init__(self, path: str, size: int, directory: Handle | None = None) -> None:
        self._path = path
        with writing(path), contextlib.ExitStack() as stack:
            here = directory or stack.enter_context(Handle.open(os.path.dirname(resolved(path))))
            name = os.path.basename(path)
            self._fd = here.open_or_create(name)
            try:
                lock(self._fd, path)
                if not self.is_at(here, name):
                    raise BusyError(path)  # the other process has just given it its final name
                try:
                    os.ftruncate(self._fd, size)
                except OSError:
                    here.unlink(name)  # this process has it locked, and nobody will finish it
                    raise
            except BaseException:
                os.close(self._fd)
                raise

    def is_at(self, directory: Handle, name: str) -> bool:
        """Whether the file is still at `name` in `directory`."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), directory.stat(name))
        return False

    def write_at(self, offset: int, data: memoryview) -> None:
        with writing(self._path):
            while data:
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count

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

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn an OSError into a FailedError that says what to do."""
    try:
        yield
    except OSError as error:
        hints = {
            errno.ENOSPC: "Free some space, or write elsewhere.",
            errno.EDQUOT: "Your quota is used up: free some space, or write elsewhere.",
            errno.EFBIG: "A limit on file sizes is in force (see `ulimit -f`): use a smaller --max-shard-size.",
            errno.EROFS: "Choose an output on a file system that can be written.",
            errno.EACCES: "Choose an output you may write, or change its permissions.",
            errno.EPERM: "Choose an output you may write, or change its permissions.",
            errno.ENOENT: "Make its directory first.",
        }
        hint = hints.get(error.errno or 0, "")
        raise FailedError(
            f"{path} cannot be written: {reason(error)}. Nothing was put under its name.", hint
        ) from error


class Syncing:
    """Runs steps that wait for the disk in its own thread, so that the next file is written meanwhile.

    At most one more step is queued: if the process is killed, only these two of the finished files lack a record. As a
    context manager: after an exception it waits for the current step and skips the rest.
    """

    def __init__(self) -> None:
        self._waiting: Queue[Callable[[], None] | None] = Queue(maxsize=1)
        self._thread: Thread | None = None
        self._failure: BaseException | None = None
        self._stopped = False

    def add(self, step: Callable[[], None]) -> None:
        """Queue `step`, to be run after those before it."""
        if self._thread is None:
            # Known before it starts: a signal that comes meanwhile is raised by `start_threads`.
            self._thread = Thread(self._work)
            start_threads([self._thread])
        if self._thread.ident is None:  # the system allows no more threads
            step()
            return
        self._waiting.put(step)

    def finish(self) -> None:
        """Wait until every step has run. Raises the error of a step that failed."""
        if self._thread is not None and self._thread.ident is not None:
            self._waiting.put(None)
            self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        for step in iter(self._waiting.get, None):
            try:
                if not self._stopped:
                    step()
            except BaseException as error:
                self._failure = error
                self._stopped = True

    def __enter__(self) -> Syncing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = kind is not None
        self.finish()


class BusyError(FailedError):
    """Another process is writing the file that this one was to write."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is being written by another process.", "Wait until it has ended, or write to another place."
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
    """Whether a living process has the open file `fd` locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def check_space(
    directory: str, size: int, what: str = "The output", hint: str = "Free some space, or write elsewhere."
) -> None:
    """Raise FailedError, before the first byte, if `size` bytes do not fit into the file system of `directory`."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    if size > free:
        raise FailedError(
            f"{what} needs {size} bytes, and {directory} has {free} bytes free. Nothing was written.", hint
        )
