"""Any range of the bytes of planned files, computed on request. Nothing is written."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Iterator, Sequence

from ckptconv.engine.buffers import Tally
from ckptconv.engine.tasks import ALIGNMENT, Piece, Task, Window
from ckptconv.engine.worker import Worker
from ckptconv.plan import Data, FilePlan, Literal
from ckptconv.storage.files import Readers, check_unchanged, is_read_far
from ckptconv.storage.reading import Options
from ckptconv.storage.stores import reached
from ckptconv.tensors.moves import File, Runs


class FileBytes:
    """The bytes of one planned file, which consists of literals and tensors. For any number of threads.

    `readers` read its inputs, of stores with these `options`. `on_lost` is called with the tally of a window in which
    values became infinite or zero in a cast, or NaN in a sum.
    """

    def __init__(
        self,
        file: FilePlan,
        readers: Readers,
        options: Options | None = None,
        on_lost: Callable[[Tally], object] = lambda tally: None,
    ) -> None:
        parts: list[Literal | Data] = []
        for part in file.parts:
            if not isinstance(part, (Literal, Data)):
                raise ValueError(f"{file.name}: a {type(part).__name__} depends on the whole file")
            if part.nbytes:
                parts.append(part)
        self.name, self.size = file.name, file.size
        self._parts: Sequence[Literal | Data] = parts
        self._starts = [part.offset for part in parts]
        self._far = any(map(is_read_far, file.inputs()))
        self._readers, self._options = readers, options
        self._on_lost = on_lost

    def read(
        self, start: int, stop: int, *, unit: int, memory: int, requests: int
    ) -> Generator[memoryview, None, None]:
        """Yield bytes `start` to `stop`, at most about `unit` at a time, each piece valid until the next.

        It takes up to four buffers of `unit`. For remote inputs, `memory` (bytes) bounds the prefetched data, with at
        most `requests` at a time. Raise CorruptError for an input that has changed, before any byte of it is yielded.
        """
        unit = -(-min(unit, stop - start) // ALIGNMENT) * ALIGNMENT
        windows = self._windows(start, stop, unit)
        if not self._far:
            yield from self._made(Worker(self._readers, None, unit), windows)
            return
        far = reached(self.name)
        with far.prefetching(self._readers, far.needs(unit), memory=memory, requests=requests) as prefetch:
            yield from self._made(Worker(prefetch, None, unit), prefetch.over(windows))

    def _made(self, worker: Worker, windows: Iterator[Task]) -> Iterator[memoryview]:
        touched: dict[File, None] = {}

        def seen(file: File, _: Runs, __: memoryview) -> None:
            touched[file.stored] = None

        worker.seen = seen
        for window in windows:
            assert isinstance(window, Window)
            data = worker.assemble(window)
            # Only now: bytes read before are of the version that is present now. Each request to a store checks that.
            check_unchanged((file for file in touched if not is_read_far(file)), self._options)
            touched.clear()
            if worker.tally.lost_in:
                self._on_lost(worker.tally)
                worker.tally = Tally()
            yield data

    def _windows(self, start: int, stop: int, unit: int) -> Iterator[Task]:
        """Yield windows of at most `unit` bytes. All but the last end at multiples of it: few elements are cut."""
        while start < stop:
            end = stop if stop - start <= unit else (start // unit + 1) * unit
            yield Window(start, end, self._pieces(start, end))
            start = end

    def _pieces(self, start: int, stop: int) -> list[Piece]:
        pieces = []
        for index in range(bisect.bisect_right(self._starts, start) - 1, len(self._parts)):
            part = self._parts[index]
            if part.offset >= stop:
                break
            pieces.append(Piece(part, max(start - part.offset, 0), min(stop - part.offset, part.nbytes)))
        return pieces
