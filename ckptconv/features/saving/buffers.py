"""Memory that is read as a file."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File


class Buffers(Reader):
    """Buffers in memory, one after the other, as if they were one file, which is called `name`."""

    def __init__(self, name: str, *buffers: memoryview) -> None:
        self.file = File(name, 0)
        self.buffers: list[memoryview] = []
        self._starts: list[int] = []
        for data in buffers:
            self.add(data)

    def add(self, data: memoryview) -> int:
        """Add bytes at the end, and return where they begin."""
        start = self.file.size
        self.buffers.append(data)
        self._starts.append(start)
        self.file = self.file._replace(size=start + len(data))
        return start

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `offset` on."""
        index = bisect.bisect_right(self._starts, offset) - 1
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                data, at = self.buffers[index], offset - self._starts[index]
                count = min(len(data) - at, len(buffer) - done)
                buffer[done : done + count] = data[at : at + count]
                done, offset = done + count, offset + count
                index += at + count == len(data)
