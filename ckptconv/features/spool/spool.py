"""A temporary file without a name, which is gone when this process ends, however it ends."""

from __future__ import annotations

import bisect
import errno
import os
import threading

from ckptconv.errors import FailedError
from ckptconv.storage.handles import Handle, resolved, unnamed
from ckptconv.storage.writing import check_space
from ckptconv.text import reason

ELSEWHERE = "Specify a directory with more space: --spool-dir."


def default_directory() -> str:
    """Return the directory to spool to by default: TMPDIR, else /var/tmp, which unlike /tmp is on a disk everywhere."""
    for directory in (os.environ.get("TMPDIR"), "/var/tmp"):
        if directory and os.path.isdir(directory):
            return directory
    return "/tmp"


class Spool:
    """A temporary file without a name in `directory`, for several threads. It grows, and reuses released room."""

    def __init__(self, directory: str = "") -> None:
        self.directory = directory or default_directory()
        self._end = 0
        # Released room: offset and size in bytes, in order and never adjacent.
        self._free: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._fd = -1

    @property
    def descriptor(self) -> int:
        """The descriptor of the file, which is made at first use."""
        with self._lock:
            if self._fd < 0:
                self._fd = _unnamed(self.directory)
            return self._fd

    def room(self, size: int) -> int:
        """Reserve `size` bytes and return their offset."""
        with self._lock:
            for index, (start, length) in enumerate(self._free):
                if length >= size:
                    self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                    return start
            start = self._end
            self._end += size
            return start

    def give_back(self, start: int, size: int) -> None:
        """Release the `size` bytes at `start`, which `room` reserved."""
        if not size:
            return
        with self._lock:
            at = bisect.bisect(self._free, (start, size))
            stop = start + size
            if at < len(self._free) and self._free[at][0] == stop:
                stop += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == start:
                at -= 1
                start = self._free.pop(at)[0]
            self._free.insert(at, (start, stop - start))

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write `data` at `offset`. Raises FailedError if that fails, as on a full disk."""
        remaining = memoryview(data)
        try:
            while remaining:
                count = os.pwrite(self.descriptor, remaining, offset)
                remaining, offset = remaining[count:], offset + count
        except OSError as error:
            raise _cannot_write(self.directory, error) from error

    def check_space(self, size: int) -> None:
        """Raise FailedError if `size` more bytes do not fit on the disk."""
        check_space(self.directory, size, "Unpacking the compressed tensors", ELSEWHERE)

    def has_room(self, size: int) -> bool:
        """Return whether `size` bytes more fit."""
        try:
            self.check_space(size)
        except FailedError:
            return False
        return True

    def close(self) -> None:
        """Close the file, which deletes it."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _unnamed(directory: str) -> int:
    try:
        with Handle.open(resolved(directory)) as handle:
            return unnamed(handle)
    except OSError as error:
        raise _cannot_write(directory, error) from error


def _cannot_write(directory: str, error: OSError) -> FailedError:
    return FailedError(
        f"A temporary file in {directory} cannot be written: {reason(error)}.",
        ELSEWHERE if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Specify another directory: --spool-dir.",
    )
