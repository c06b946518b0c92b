"""What verification reads from far away, fetched before it is asked for: many small ranges as few large ones.

A conversion plans its reads by the moves that it is made of (`ahead`). Nothing of that is used here, as what plans a
conversion may not decide what it is verified with: ranges are told by the expressions themselves (`reference`), and
batches of them are fetched, compared, and let go of, one after the other.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from ckptconv.errors import FailedError
from ckptconv.storage.files import DescriptorReader, Reader, RemoteReader
from ckptconv.storage.spool import SpoolingReaders
from ckptconv.tensors.moves import File
from ckptconv.verification.evaluate import Span

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")

# A request asks for so much at most, and reads along what costs less than to ask again.
REQUEST, GAP = 4 << 20, 1 << 16
# What a batch is fetched for, unless its requests would be smaller than `SMALL` on average; and what it is then.
BATCH, SMALL, LARGEST = 16 << 20, 1 << 20, 1 << 29
# A batch is made larger only if there is so much more room for it than it takes.
ROOM = 4
# As many tasks wait for each other, and as many requests are under way.
TASKS, REQUESTS = 4096, 8
STACK = 512 << 10


class Nearby:
    """Readers of files, of which those far away are read in batches. Used as a context, by one thread.

    A batch is held in memory, or in the spool where it is a larger one. `bytes_fetched` counts what came from far
    away, `bytes_given` what was taken of that.
    """

    def __init__(self, readers: SpoolingReaders) -> None:
        self._readers = readers
        self._extents: dict[File, list[_Extent]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        self.bytes_fetched = self.bytes_given = 0

    def __enter__(self) -> Nearby:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    @contextlib.contextmanager
    def reading(self, file: File) -> Iterator[Reader]:
        """The reader of `file`, as `Readers.reading` gives it."""
        extents = self._extents.get(file)
        if extents is None:
            with self._readers.reading(file) as reader:
                yield reader
        else:
            yield _Fetched(self, file, extents)

    def over(self, tasks: Iterable[T], needs: Callable[[T], Sequence[Span]]) -> Iterator[T]:
        """`tasks`, each when what it `needs` from far away is here. What was not named is read all the same."""
        batch: list[T] = []
        spans: list[Span] = []
        wanted, target = 0, BATCH
        for task in tasks:
            needed = needs(task)
            if not needed and not batch:
                yield task
                continue
            size = sum(span.stop - span.start for span in needed)
            if batch and (wanted + size > target or len(batch) == TASKS):
                if len(batch) < TASKS and self._is_worth_more(spans, 2 * target):
                    target *= 2
                else:
                    yield from self._use(batch, spans)
                    batch, spans, wanted, target = [], [], 0, BATCH
            batch.append(task)
            spans.extend(needed)
            wanted += size
        yield from self._use(batch, spans)

    def _is_worth_more(self, spans: list[Span], size: int) -> bool:
        """Whether requests would be small, as those to many ranks are, and a batch of `size` bytes can be held."""
        extents = joined(spans)
        return _total(extents) < SMALL * len(extents) and size <= LARGEST and self._has_room(ROOM * size)

    def _use(self, batch: list[T], spans: list[Span]) -> Iterator[T]:
        extents = joined(spans)
        try:
            self._fetch(extents)
            yield from batch
        finally:
            self._extents = {}
            for extent in extents:
                if extent.place >= 0:
                    self._readers.spool.give_back(extent.place, extent.nbytes)

    # ---- fetching

    def _fetch(self, extents: list[_Extent]) -> None:
        total = _total(extents)
        spooled = total > 2 * BATCH
        if not extents or (spooled and not self._has_room(total)):
            return
        under_way = []
        for extent in extents:
            with self._readers.reading(extent.file) as reader:
                assert isinstance(reader, RemoteReader)
            if reader.parallel:
                under_way.append(self._submit(reader, extent, spooled))
            else:
                self._fetch_one(reader, extent, spooled)
        for future in under_way:
            future.result()
        for extent in extents:
            self._extents.setdefault(extent.file, []).append(extent)
        self.bytes_fetched += total

    def _submit(self, reader: RemoteReader, extent: _Extent, spooled: bool) -> Future[None]:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(REQUESTS)
        usual = threading.stack_size(STACK)
        try:
            return self._pool.submit(self._fetch_one, reader, extent, spooled)
        finally:
            threading.stack_size(usual)

    def _fetch_one(self, reader: RemoteReader, extent: _Extent, spooled: bool) -> None:
        if self._stop.is_set():
            raise FailedError("Reading was given up.")
        spool = self._readers.spool
        if spooled:
            place = extent.place = spool.room(extent.nbytes)
            reader.fetch(extent.start, extent.nbytes, lambda at, data: spool.write_at(place + at, data), self._stop)
            return
        held = memoryview(bytearray(extent.nbytes))

        def keep(at: int, data: bytes) -> None:
            held[at : at + len(data)] = data

        reader.fetch(extent.start, extent.nbytes, keep, self._stop)
        extent.data = held

    def _has_room(self, size: int) -> bool:
        try:
            self._readers.spool.check_space(size)
        except FailedError:
            return False
        return True

    # ---- reading

    def give(self, file: File, extent: _Extent, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what is at `offset` of the file."""
        at = offset - extent.start
        if extent.place >= 0:
            DescriptorReader(file, self._readers.spool.descriptor).fill(extent.place + at, [buffer])
        else:
            buffer[:] = extent.data[at : at + len(buffer)]
        self.bytes_given += len(buffer)

    def directly(self, file: File, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what was not fetched."""
        with self._readers.reading(file) as reader:
            reader.fill(offset, [buffer])


class _Extent:
    """What one request fetches, and where it is once it is here: in memory, or in the spool from byte `place` on."""

    __slots__ = ("data", "file", "place", "start", "stop")

    def __init__(self, file: File, start: int, stop: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self.data, self.place = memoryview(b""), -1

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class _Fetched(Reader):
    def __init__(self, nearby: Nearby, file: File, extents: list[_Extent]) -> None:
        self.file = file
        self._nearby, self._extents = nearby, extents

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            while buffer:
                count = self._fill(offset, buffer)
                offset, buffer = offset + count, buffer[count:]

    def _fill(self, offset: int, buffer: memoryview) -> int:
        index = bisect.bisect_right(self._extents, offset, key=lambda extent: extent.start)
        if index and offset < self._extents[index - 1].stop:
            extent = self._extents[index - 1]
            count = min(len(buffer), extent.stop - offset)
            self._nearby.give(self.file, extent, offset, buffer[:count])
            return count
        # Up to what is there.
        count = min([len(buffer), *(extent.start - offset for extent in self._extents[index : index + 1])])
        self._nearby.directly(self.file, offset, buffer[:count])
        return count


def joined(spans: Iterable[Span]) -> list[_Extent]:
    """The requests that fetch `spans`: those of one file are joined along small gaps, long ones are cut."""
    runs: dict[File, list[list[int]]] = {}
    for file, start, stop in sorted(spans, key=lambda span: span.start):
        known = runs.setdefault(file, [])
        if known and start <= known[-1][1] + GAP:
            known[-1][1] = max(known[-1][1], stop)
        else:
            known.append([start, stop])
    return [
        _Extent(file, at, min(at + REQUEST, stop))
        for file, found in runs.items()
        for start, stop in found
        for at in range(start, stop, REQUEST)
    ]


def _total(extents: Iterable[_Extent]) -> int:
    return sum(extent.nbytes for extent in extents)
