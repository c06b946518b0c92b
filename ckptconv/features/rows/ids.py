"""Finds ids that occur twice, among more than memory holds, by merging sorted runs in a temporary file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ckptconv.features.spool.spool import Spool
from ckptconv.storage.files import DescriptorReader
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

# Ids in a run, 8 bytes each. While runs are merged, a quarter as many ids of all runs together are in memory, but at
# least SMALLEST of each run: with more than 500 million ids, memory grows by 1 KiB for each further 500,000.
RUN = 1 << 19
SMALLEST = 128


class Ids:
    """Takes 64-bit ids, and reports those that came more than once. `spool` holds the ids that memory does not."""

    def __init__(self, spool: Spool, run: int = RUN, smallest: int = SMALLEST) -> None:
        self._spool, self._run, self._smallest = spool, run, smallest
        self._buffer: Array = numpy_module().empty(run, "<i8")
        self._filled = 0
        self._runs: list[tuple[int, int]] = []

    def add(self, ids: Array) -> None:
        """Take more ids."""
        while len(ids):
            taken = ids[: self._run - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            ids = ids[len(taken) :]
            if self._filled == self._run:
                self._spill()

    def _spill(self) -> None:
        self._buffer[: self._filled].sort()
        data = memoryview(self._buffer[: self._filled]).cast("B")  # type: ignore[arg-type]
        place = self._spool.room(len(data))
        self._spool.write_at(place, data)
        self._runs.append((place, self._filled))
        self._filled = 0

    def repeated(self, most: int) -> tuple[int, list[int]]:
        """Return the number of ids that repeat earlier ones, and the `most` smallest repeated ids."""
        np = numpy_module()
        repeats = _Repeats(most)
        if not self._runs:
            self._buffer[: self._filled].sort()
            repeats.look(self._buffer[: self._filled])
            return repeats.count, repeats.values
        if self._filled:
            self._spill()
        size = max(self._run // 4 // len(self._runs), self._smallest)
        self._buffer = np.empty(0, "<i8")
        blocks = [_Block(self._spool, place, count, size) for place, count in self._runs]
        # The first and last id of each block. No id that is still unread is less than the least last one.
        firsts = np.array([block.ids[0] for block in blocks])
        lasts = np.array([block.ids[-1] for block in blocks])
        alive = np.ones(len(blocks), bool)
        while alive.any():
            limit = lasts[alive].min()
            pieces = []
            for index in np.nonzero(alive & (firsts <= limit))[0]:
                block = blocks[index]
                pieces.append(block.take(limit))
                if len(block.ids):
                    firsts[index], lasts[index] = block.ids[0], block.ids[-1]
                else:
                    alive[index] = False
            merged = np.concatenate(pieces)
            merged.sort(kind="stable")  # quick on sorted pieces that follow each other
            repeats.look(merged)
        return repeats.count, repeats.values


class _Block:
    """A buffer of the next ids of a run."""

    def __init__(self, spool: Spool, place: int, count: int, size: int) -> None:
        self._reader = DescriptorReader(File("a temporary file", 0), spool.descriptor)
        self._place, self._left, self._size = place, count, size
        self.ids: Array = numpy_module().empty(0, "<i8")
        self._fill()

    def _fill(self) -> None:
        np = numpy_module()
        count = min(self._size, self._left)
        self.ids = np.empty(count, "<i8")
        if count:
            self._reader.fill(self._place, [memoryview(self.ids).cast("B")])  # type: ignore[arg-type]
        self._place += 8 * count
        self._left -= count

    def take(self, limit: int) -> Array:
        """Remove and return the ids up to `limit`. Read more if none is left."""
        end = int(numpy_module().searchsorted(self.ids, limit, side="right"))
        taken, self.ids = self.ids[:end], self.ids[end:]
        if not len(self.ids):
            self._fill()
        return taken


class _Repeats:
    """Counts ids that equal the one before them, over sorted pieces."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self.values: list[int] = []
        self._most = most
        self._last: int | None = None

    def look(self, ids: Array) -> None:
        if not len(ids):
            return
        again = ids[1:][ids[1:] == ids[:-1]]
        first = [int(ids[0])] if self._last == ids[0] else []
        self.count += len(again) + len(first)
        # The ids are sorted, so an id that occurs many times stands many times in a row.
        distinct = again[numpy_module().insert(again[1:] != again[:-1], 0, True)] if len(again) else again
        for value in (*first, *distinct[: self._most + 1].tolist()):
            if value not in self.values and len(self.values) < self._most:
                self.values.append(value)
        self._last = int(ids[-1])
