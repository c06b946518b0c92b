"""Readers of bytes in memory: of descriptions, which it keeps as it reads them, and of files held as a whole."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from ckptconv.errors import CorruptError
from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File

# Bytes to read for a small part of a description, from a local and a remote file; number of such blocks to keep.
LOCAL_BUFFER, REMOTE_BUFFER, BUFFERS_KEPT = 1 << 11, 1 << 16, 8
# Bytes of the kept blocks at most, if there is more than one.
MAX_BUFFERED = 1 << 20


class BufferedReader(Reader):
    """Reads descriptions, which are many small things near each other. Each miss reads a block; a few blocks are kept.

    A block begins at the requested offset; with `around`, it extends by a block's size to both sides of the request.
    `bytes_read` counts the bytes requested from `reader`, except by `fill`, which bypasses the buffer.
    """

    def __init__(self, reader: Reader, around: bool = False, *, far: bool = False) -> None:
        self.file = reader.file
        self.bytes_read = 0
        self._reader, self._around = reader, around
        self._block = REMOTE_BUFFER if far else LOCAL_BUFFER
        # Blocks of remote files are shared: a file may be opened several times to inspect it. Local ones are quickly
        # read again.
        self._blocks = _remote_blocks if far and reader.file.stamp else _Blocks()

    def read_at(self, offset: int, length: int) -> bytes:
        size, block = self.file.size, self._block
        if offset + length > size or (length >= block and not self._around):
            return self.read_past(offset, length)
        data = self._blocks.find(self.file, offset, length)
        if data is None:
            if self._around:
                start, stop = max(offset - block, 0), min(offset + length + block, size)
            else:
                # Usually the following bytes are wanted next. But the end of a file is read backwards, so the last
                # block starts earlier.
                start = min(offset, max(size - block, 0))
                stop = min(start + block, size)
            past = self.read_past(start, stop - start)
            self._blocks.keep(self.file, start, past)
            data = past[offset - start : offset - start + length]
        return data

    def read_past(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`, bypassing the buffer."""
        data = self._reader.read_at(offset, length)
        self.bytes_read += length
        return data

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._reader.fill(offset, buffers)

    def close(self) -> None:
        self._reader.close()


class InMemory(Reader):
    """Reads `data` as a file called `path`."""

    def __init__(self, data: bytes, path: str) -> None:
        self.file = File(path, len(data))
        self._data = data

    def read_at(self, offset: int, length: int) -> bytes:
        if offset + length > len(self._data):
            raise CorruptError(f"{self.file.path} ends at byte {len(self._data)}, before byte {offset + length}.")
        return self._data[offset : offset + length]


class _Blocks:
    """The most recently used blocks of descriptions, shared by several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[File, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, file: File, offset: int, length: int) -> bytes | None:
        with self._lock:
            # Most often the last one is wanted again.
            for key, data in reversed(self._kept.items()):
                start = key[1]
                if start <= offset and offset + length <= start + len(data) and key[0] == file:
                    self._kept.move_to_end(key)
                    return data[offset - start : offset - start + length]
        return None

    @property
    def _nbytes(self) -> int:
        return sum(map(len, self._kept.values()))

    def keep(self, file: File, start: int, data: bytes) -> None:
        with self._lock:
            self._kept[file, start] = data
            while len(self._kept) > BUFFERS_KEPT or (len(self._kept) > 1 and self._nbytes > MAX_BUFFERED):
                self._kept.popitem(last=False)


_remote_blocks = _Blocks()
