"""Readers of parts of files, for files inside archives and pickles."""

from __future__ import annotations

from ckptconv.errors import CorruptError
from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File


class PartReader(Reader):
    """Reads `size` bytes from byte `start` of another reader as a file of their own, called `path`."""

    def __init__(self, reader: Reader, path: str, start: int, size: int) -> None:
        self.file = File(path, min(size, max(reader.file.size - start, 0)))
        self._reader, self._start = reader, start

    def read_at(self, offset: int, length: int) -> bytes:
        if offset + length > self.file.size:
            raise CorruptError(f"{self.file.path} ends at byte {self.file.size}, but should be longer.")
        return self._reader.read_at(self._start + offset, length)
