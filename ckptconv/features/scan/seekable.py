"""Readers as file objects, for modules of the standard library."""

from __future__ import annotations

import errno
import io
from typing import Any

from ckptconv.storage.reading import Reader


class Seekable(io.RawIOBase):
    """A reader as `tarfile` takes a file."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader, self._at = reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._reader.file.size)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "before the first byte")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        data = self._reader.read_at(self._at, max(min(len(out), self._reader.file.size - self._at), 0))
        out[: len(data)] = data
        self._at += len(data)
        return len(data)
