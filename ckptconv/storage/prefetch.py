"""Reads from far away, planned: ranges of many tasks together, in few requests, several of them under way.

Tasks are taken in spans. What a span reads is sorted and joined, along small gaps too, and fetched while the span
before is worked on. Where that would be many small requests, as with the partitions of many ranks, a span is made
longer than memory allows, and what was fetched waits in a temporary file. So it does where all of a large tensor is
needed again and again.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ckptconv.errors import FailedError
from ckptconv.storage.files import DescriptorReader, Reader, Readers, RemoteReader, is_far
from ckptconv.storage.spool import Spool
from ckptconv.tensors.moves import GAP, File

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

# A request asks for so much, if that much is wanted in one place, or for less than twice as much.
REQUEST = 5 << 20
# Of what is fetched, so much may be bytes between those that are wanted.
WASTE = 25
# More is worth while where requests would be smaller than this on average, as long as a gap is not larger than that.
TINY, WIDE_GAP = 64 << 10, 256 << 10
# What may be fetched into a temporary file ahead of its use, and how much room there must be for each byte of it.
MOST_SPOOLED, ROOM = 1 << 30, 4
# As many requests are under way, and twice as many tasks are looked at for a longer span.
REQUESTS = 8
STACK = 512 << 10


class Range(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    file: File
    start: int
    stop: int


Task = TypeVar("Task")


class Extent:
    """A range that one request fetches, and where its bytes are once it is there: in memory, or in the spool."""

    __slots__ = ("data", "done", "file", "place", "start", "stop")

    def __init__(self, file: File, start: int, stop: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self.data = memoryview(b"")
        self.place = -1
        self.done: Future[None] | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Span(Generic[Task]):
    """Tasks that follow one another, and what they read from far away. `spooled`: it waits in the spool."""

    def __init__(self, tasks: list[Task], extents: list[Extent], spooled: bool) -> None:
        self.tasks, self.extents, self.spooled = tasks, extents, spooled
        self.by_file: dict[File, list[Extent]] = {}
        for extent in extents:
            self.by_file.setdefault(extent.file, []).append(extent)
        for each in self.by_file.values():
            each.sort(key=attrgetter("start"))

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)


def joined(ranges: Iterable[Range], request: int = REQUEST) -> list[Extent]:
    """The requests that fetch `ranges`: those of one file are joined along small gaps, long ones are cut.

    They come in the order in which the first of their bytes are named.
    """
    by_file: dict[File, list[tuple[int, int, int]]] = {}
    for rank, (file, start, stop) in enumerate(ranges):
        by_file.setdefault(file, []).append((start, stop, rank))
    runs = {file: _merged(found, GAP) for file, found in by_file.items()}
    wanted = sum(stop - start for found in runs.values() for start, stop, _ in found)
    limit = _widest_gap([_gaps(found) for found in runs.values()], wanted)
    made = [
        (rank, part)
        for file, found in runs.items()
        for start, stop, rank in _merged(found, limit)
        for part in _cut(file, start, stop, request)
    ]
    return [extent for _, extent in sorted(made, key=lambda each: each[0])]


def _merged(found: list[tuple[int, int, int]], gap: int) -> list[tuple[int, int, int]]:
    """Ranges with their ranks, in the order of the file, those no more than `gap` apart as one."""
    runs: list[tuple[int, int, int]] = []
    for start, stop, rank in sorted(found):
        if runs and start <= runs[-1][1] + gap:
            first, last, lowest = runs[-1]
            runs[-1] = first, max(last, stop), min(lowest, rank)
        else:
            runs.append((start, stop, rank))
    return runs


def _gaps(runs: list[tuple[int, int, int]]) -> list[int]:
    return [after[0] - before[1] for before, after in itertools.pairwise(runs)]


def _widest_gap(gaps: Sequence[list[int]], wanted: int) -> int:
    """The widest gap that is read along, so that no more than a small share of `wanted` bytes is read in vain."""
    requests = len(gaps) + sum(map(len, gaps))
    waste = widest = 0
    # Ranks are alike, and so are their gaps: those of a width are all read along, or none.
    for gap, count in sorted(Counter(itertools.chain.from_iterable(gaps)).items()):
        waste += gap * count
        if waste * WASTE > wanted and not (gap <= WIDE_GAP and wanted < TINY * requests):
            break
        widest = gap
        requests -= count
    return widest


def _cut(file: File, start: int, stop: int, request: int) -> Iterator[Extent]:
    count = max((stop - start) // request, 1)
    for number in range(count):
        size = stop - start
        yield Extent(file, start + size * number // count, start + size * (number + 1) // count)


# ---------------------------------------------------------------------------------------------------------- spans


class Ahead(Generic[Task]):
    """Readers of what lies far away, for one thread that takes the tasks of `over` in order.

    `memory` (bytes) bounds what is fetched and not used yet, but for what waits in `spool`; `requests` are under way at
    a time. `needs` gives the ranges that a task reads. What was not planned is read all the same, when it is asked for.
    Used as a context.
    """

    def __init__(
        self,
        readers: Readers,
        spool: Spool,
        needs: Callable[[Task], Iterable[Range]],
        *,
        memory: int,
        requests: int = REQUESTS,
    ) -> None:
        self._readers, self._spool, self._needs = readers, spool, needs
        self._request = max(min(REQUEST, memory // 2), 1 << 16)
        # In memory two spans are held, one that is used and one that comes.
        self._unit = memory // 2
        self._requests = requests
        self._pool: ThreadPoolExecutor | None = None
        self._far: dict[File, RemoteReader] = {}
        self._lock = threading.Lock()
        self._current: Span[Task] | None = None
        self._stop = threading.Event()
        self.bytes_fetched = self.requests_made = 0

    def __enter__(self) -> Ahead[Task]:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- planning

    def over(self, tasks: Iterator[Task]) -> Iterator[Task]:
        """`tasks`, while what the next ones need is fetched."""
        spans = self._spans(tasks)
        coming: deque[Span[Task]] = deque()
        for span in spans:
            self._begin(span)
            coming.append(span)
            if len(coming) == 2:
                yield from self._use(coming.popleft())
        while coming:
            yield from self._use(coming.popleft())

    def _use(self, span: Span[Task]) -> Iterator[Task]:
        self._current = span
        yield from span.tasks
        self._current = None
        self._end(span)

    def _spans(self, tasks: Iterator[Task]) -> Iterator[Span[Task]]:
        taken: list[Task] = []
        ranges: dict[Range, None] = {}
        wanted, target = 0, self._unit
        for task in tasks:
            found = dict.fromkeys(self._needs(task))
            # A range may be named again by every task that reads in it.
            size = sum(each.stop - each.start for each in found if each not in ranges)
            if taken and size and wanted + size > target:
                extents = joined(ranges, self._request)
                fetched = sum(extent.nbytes for extent in extents)
                if fetched < len(extents) * self._request and self._may_spool(2 * target):
                    target *= 2
                else:
                    yield self._span(taken, extents, fetched)
                    taken, ranges, wanted, target = [], {}, 0, self._unit
                    size = sum(each.stop - each.start for each in found)
            taken.append(task)
            ranges.update(found)
            wanted += size
        if taken:
            extents = joined(ranges, self._request)
            yield self._span(taken, extents, sum(extent.nbytes for extent in extents))

    def _span(self, tasks: list[Task], extents: list[Extent], fetched: int) -> Span[Task]:
        return Span(tasks, extents, fetched > self._unit)

    def _may_spool(self, size: int) -> bool:
        """Whether as much may wait in the spool, twice."""
        return size <= MOST_SPOOLED and 2 * size * ROOM < free_space(self._spool.directory)

    # ---- fetching

    def _begin(self, span: Span[Task]) -> None:
        for extent in span.extents:
            extent.done = self._submit(extent, span.spooled)

    def _submit(self, extent: Extent, spooled: bool) -> Future[None]:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(self._requests if self._reader(extent.file).parallel else 1)
        usual = threading.stack_size(STACK)
        try:
            return self._pool.submit(self._fetch, extent, spooled)
        finally:
            threading.stack_size(usual)

    def _fetch(self, extent: Extent, spooled: bool) -> None:
        if self._stop.is_set():
            raise FailedError("Reading was given up.")
        reader = self._reader(extent.file)
        if not spooled:
            data = memoryview(bytearray(extent.nbytes))

            def keep(at: int, came: bytes) -> None:
                data[at : at + len(came)] = came

            reader.fetch(extent.start, extent.nbytes, keep, self._stop)
            extent.data = data
        else:
            place = self._spool.room(extent.nbytes)
            reader.fetch(
                extent.start, extent.nbytes, lambda at, came: self._spool.write_at(place + at, came), self._stop
            )
            extent.place = place
        with self._lock:
            self.bytes_fetched += extent.nbytes
            self.requests_made += 1

    def _end(self, span: Span[Task]) -> None:
        for extent in span.extents:
            extent.data = memoryview(b"")
            if extent.place >= 0:
                self._spool.give_back(extent.place, extent.nbytes)
                extent.place = -1

    def _reader(self, file: File) -> RemoteReader:
        with self._lock:
            reader = self._far.get(file)
            if reader is None:
                opened = self._readers.open(file)
                assert isinstance(opened, RemoteReader)
                reader = self._far[file] = opened
            return reader

    # ---- reading

    @contextlib.contextmanager
    def reading(self, file: File) -> Iterator[Reader]:
        """The reader of `file`, as `Readers.reading` gives it."""
        span = self._current
        if span is not None and file in span.by_file:
            yield _Fetched(self, span.by_file[file], file)
        else:
            with self._readers.reading(file) as reader:
                yield reader

    def from_spool(self, extent: Extent, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what is at `offset` of the extent's file."""
        place = extent.place + offset - extent.start
        DescriptorReader(extent.file, self._spool.descriptor).fill(place, [buffer])

    def directly(self, file: File, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what was not planned."""
        self._reader(file).fill(offset, [buffer])
        with self._lock:
            self.bytes_fetched += len(buffer)
            self.requests_made += 1


class _Fetched(Reader):
    """Reads what was fetched, and waits for it."""

    def __init__(self, ahead: Ahead[Any], extents: list[Extent], file: File) -> None:
        self.file = file
        self._ahead, self._extents = ahead, extents
        self._starts = [extent.start for extent in extents]

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            rest = buffer
            while rest:
                count = self._fill(offset, rest)
                offset, rest = offset + count, rest[count:]

    def _fill(self, offset: int, buffer: memoryview) -> int:
        index = bisect.bisect_right(self._starts, offset) - 1
        extent = self._extents[index] if index >= 0 else None
        if extent is None or offset >= extent.stop:
            # Up to what is there.
            stop = min(self._starts[index + 1 : index + 2], default=offset + len(buffer))
            count = min(len(buffer), stop - offset)
            self._ahead.directly(self.file, offset, buffer[:count])
            return count
        assert extent.done is not None
        extent.done.result()
        at = offset - extent.start
        count = min(len(buffer), extent.stop - offset)
        if extent.place >= 0:
            self._ahead.from_spool(extent, offset, buffer[:count])
        else:
            buffer[:count] = extent.data[at : at + count]
        return count


def free_space(directory: str) -> int:
    """Bytes that may be written in the file system of `directory`; 0 where that cannot be told."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def is_read_far(file: File) -> bool:
    """Whether a file is read from far away, as it is."""
    return file.packed is None and is_far(file.path)
