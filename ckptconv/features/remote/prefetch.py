"""Prefetch the ranges that tasks read from remote files: of many tasks together, in few concurrent requests.

Tasks are taken in batches. The ranges that a batch reads are sorted, coalesced across small gaps, and fetched while the
previous batch is processed. If that would be many small requests, as with the partitions of many ranks, a batch is made
larger than memory allows, and the fetched data waits in a temporary file, the spool. The same happens if all of a large
tensor is needed repeatedly. Both conversion and verification read through it; it cannot change a byte.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ckptconv.errors import FailedError
from ckptconv.features.spool.spool import Spool
from ckptconv.storage.files import DescriptorReader, Readers
from ckptconv.storage.reading import REQUESTS, Range, Reader
from ckptconv.tensors.moves import GAP, File

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckptconv.features.remote.files import RemoteReader

# Bytes of a request, if that much is wanted in one place; at most twice as large.
REQUEST = 5 << 20
# Bytes to read in gaps at most, as a share of the wanted bytes.
MAX_OVERREAD = 1 / 25
# Gaps of at most `MAX_GAP` bytes are read anyway while requests would be smaller than `SMALL_REQUEST` on average.
MAX_GAP, SMALL_REQUEST = 256 << 10, 64 << 10
# Bytes of a spooled batch at most; bytes that must be free on the disk for each of them.
MAX_SPOOLED, SPOOL_HEADROOM = 1 << 30, 4
# Tasks of a batch at most, unless they all read the same bytes.
MAX_TASKS = 4096
STACK = 512 << 10


Task = TypeVar("Task")


class Extent:
    """A range that one request fetches. Once fetched, its bytes are in memory (`data`) or in the spool (at `place`)."""

    __slots__ = ("data", "done", "file", "place", "start", "stop")

    def __init__(self, file: File, start: int, stop: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self.data = memoryview(b"")
        self.place = -1
        self.done: Future[None] | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Batch(Generic[Task]):
    """Consecutive tasks, and the remote ranges they read. `spooled`: the fetched ranges wait in the spool."""

    def __init__(self, tasks: list[Task], extents: list[Extent], spooled: bool) -> None:
        self.tasks, self.extents, self.spooled = tasks, extents, spooled
        self.by_file: dict[File, list[Extent]] = {}
        for extent in sorted(extents, key=attrgetter("start")):
            self.by_file.setdefault(extent.file, []).append(extent)


def total_bytes(extents: Iterable[Extent]) -> int:
    """Return the number of bytes that the requests fetch."""
    return sum(extent.nbytes for extent in extents)


def coalesce(ranges: Iterable[Range], request: int = REQUEST) -> list[Extent]:
    """Return the requests that fetch `ranges`: ranges of one file are joined across small gaps, long ones are cut.

    They are ordered by the first of `ranges` that each contains.
    """
    by_file: dict[File, list[tuple[int, int, int]]] = {}
    for rank, (file, start, stop) in enumerate(ranges):
        by_file.setdefault(file, []).append((start, stop, rank))
    runs = {file: _merged(spans, GAP) for file, spans in by_file.items()}
    wanted = sum(stop - start for spans in runs.values() for start, stop, _ in spans)
    limit = _widest_gap([_gaps(spans) for spans in runs.values()], wanted)
    requests = [
        (rank, part)
        for file, spans in runs.items()
        for start, stop, rank in _merged(spans, limit)
        for part in _cut(file, start, stop, request)
    ]
    return [extent for _, extent in sorted(requests, key=lambda ranked: ranked[0])]


def _merged(spans: list[tuple[int, int, int]], gap: int) -> list[tuple[int, int, int]]:
    """Merge ranges (start, stop, rank) that are no more than `gap` apart; the result is in file order."""
    runs: list[tuple[int, int, int]] = []
    for start, stop, rank in sorted(spans):
        if runs and start <= runs[-1][1] + gap:
            first, last, lowest = runs[-1]
            runs[-1] = first, max(last, stop), min(lowest, rank)
        else:
            runs.append((start, stop, rank))
    return runs


def _gaps(runs: list[tuple[int, int, int]]) -> list[int]:
    return [after[0] - before[1] for before, after in itertools.pairwise(runs)]


def _widest_gap(gaps: Sequence[list[int]], wanted: int) -> int:
    """Return the widest gap to read rather than skip, such that only a small share of the bytes read is unwanted."""
    requests = len(gaps) + sum(map(len, gaps))
    overread = widest = 0
    # Ranks have equal gaps: read all gaps of one width, or none.
    for gap, count in sorted(Counter(itertools.chain.from_iterable(gaps)).items()):
        overread += gap * count
        if overread > MAX_OVERREAD * wanted and not (gap <= MAX_GAP and wanted < SMALL_REQUEST * requests):
            break
        widest = gap
        requests -= count
    return widest


def _cut(file: File, start: int, stop: int, request: int) -> Iterator[Extent]:
    count = max((stop - start) // request, 1)
    for number in range(count):
        size = stop - start
        yield Extent(file, start + size * number // count, start + size * (number + 1) // count)


# -------------------------------------------------------------------------------------------------------- batches


class Prefetch(Generic[Task]):
    """Readers of remote files, for one thread that takes the tasks of `over` in order; a context manager.

    `memory` (bytes) bounds the data that is fetched and not used yet, except for data in `spool`. At most `requests`
    requests run at a time, each for `request` bytes if that many are wanted. `needs` returns the remote ranges that a
    task reads; other ranges are read on demand.

    `bytes_fetched` counts the bytes from remote files, `bytes_used` the bytes that tasks read.
    """

    def __init__(
        self,
        readers: Readers,
        spool: Spool,
        needs: Callable[[Task], Iterable[Range]],
        *,
        memory: int,
        requests: int = REQUESTS,
        request: int | None = None,
    ) -> None:
        self._readers, self._spool, self._needs = readers, spool, needs
        self._request = request or REQUEST
        # Memory holds two batches, one in use and one being fetched.
        self._unit = memory // 2
        # If requests are smaller than this on average, a larger batch is worthwhile.
        self._small = max(min(self._request, self._unit), 1 << 16)
        self._requests = requests
        self._pool: ThreadPoolExecutor | None = None
        self._remote: dict[File, RemoteReader] = {}
        self._lock = threading.Lock()
        self._current: Batch[Task] | None = None
        self._stop = threading.Event()
        self.bytes_fetched = self.bytes_used = 0

    def __enter__(self) -> Prefetch[Task]:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- planning

    def over(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield `tasks` while the ranges of the next ones are fetched."""
        coming: deque[Batch[Task]] = deque()
        for batch in self._batches(tasks):
            self._begin(batch)
            coming.append(batch)
            if len(coming) == 2 or not batch.extents:
                yield from self._use(coming.popleft())
        while coming:
            yield from self._use(coming.popleft())

    def _use(self, batch: Batch[Task]) -> Iterator[Task]:
        self._current = batch
        yield from batch.tasks
        self._current = None
        self._end(batch)

    def _batches(self, tasks: Iterable[Task]) -> Iterator[Batch[Task]]:
        taken: list[Task] = []
        ranges: dict[Range, None] = {}
        wanted, target = 0, self._unit
        for task in tasks:
            needed = dict.fromkeys(self._needs(task))
            if not needed and not taken:
                yield Batch([task], [], spooled=False)
                continue
            # Several tasks may name the same range: count it once.
            size = sum(span.stop - span.start for span in needed if span not in ranges)
            is_full = len(taken) >= MAX_TASKS
            if taken and ((size and wanted + size > target) or (is_full and (size or not needed))):
                extents = coalesce(ranges, self._request)
                if not is_full and self._is_worth_more(extents, 2 * target):
                    target *= 2
                else:
                    yield self._batch(taken, extents)
                    taken, ranges, wanted, target = [], {}, 0, self._unit
                    size = sum(span.stop - span.start for span in needed)
            taken.append(task)
            ranges.update(needed)
            wanted += size
        if taken:
            yield self._batch(taken, coalesce(ranges, self._request))

    def _is_worth_more(self, extents: list[Extent], size: int) -> bool:
        """Return whether requests are small, and the spool has room for a batch of `size` bytes and the one before
        it."""
        return (
            total_bytes(extents) < len(extents) * self._small
            and size <= MAX_SPOOLED
            and self._spool.has_room(2 * size * SPOOL_HEADROOM)
        )

    def _batch(self, tasks: list[Task], extents: list[Extent]) -> Batch[Task]:
        size = total_bytes(extents)
        if size > self._unit and not self._spool.has_room(size):
            return Batch(tasks, [], spooled=False)
        return Batch(tasks, extents, spooled=size > self._unit)

    # ---- fetching

    def _begin(self, batch: Batch[Task]) -> None:
        for extent in batch.extents:
            extent.done = self._submit(extent, batch.spooled)

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
            raise FailedError("Reading was cancelled.")
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

    def _end(self, batch: Batch[Task]) -> None:
        for extent in batch.extents:
            extent.data = memoryview(b"")
            if extent.place >= 0:
                self._spool.give_back(extent.place, extent.nbytes)
                extent.place = -1

    def _reader(self, file: File) -> RemoteReader:
        with self._lock:
            reader = self._remote.get(file)
            if reader is None:
                opened = self._readers.open(file)
                reader = self._remote[file] = cast("RemoteReader", opened)
            return reader

    # ---- reading

    def reading(self, file: File) -> contextlib.AbstractContextManager[Reader]:
        """Return a context that gives the reader of `file`, as `Readers.reading` does."""
        batch = self._current
        if batch is not None and batch.by_file and file in batch.by_file:
            return contextlib.nullcontext(_Prefetched(self, batch.by_file[file], file))
        return self._readers.reading(file)

    def fill(self, file: File, extent: Extent | None, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of `file`: from `extent`, once it is fetched, or if that is None by a request."""
        self.bytes_used += len(buffer)
        if extent is None:
            self._reader(file).fill(offset, [buffer])
            with self._lock:
                self.bytes_fetched += len(buffer)
            return
        assert extent.done is not None
        extent.done.result()
        at = offset - extent.start
        if extent.place >= 0:
            DescriptorReader(file, self._spool.descriptor).fill(extent.place + at, [buffer])
        else:
            buffer[:] = extent.data[at : at + len(buffer)]


class _Prefetched(Reader):
    """Reads prefetched ranges of a file, waiting for them if need be; reads other ranges on demand."""

    def __init__(self, prefetch: Prefetch[Any], extents: list[Extent], file: File) -> None:
        self.file = file
        self._prefetch, self._extents = prefetch, extents

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            remaining = buffer
            while remaining:
                count = self._fill(offset, remaining)
                offset, remaining = offset + count, remaining[count:]

    def _fill(self, offset: int, buffer: memoryview) -> int:
        after = bisect.bisect_right(self._extents, offset, key=attrgetter("start"))
        extent = self._extents[after - 1] if after and offset < self._extents[after - 1].stop else None
        stop = extent.stop if extent else next((later.start for later in self._extents[after : after + 1]), None)
        count = len(buffer) if stop is None else min(len(buffer), stop - offset)
        self._prefetch.fill(self.file, extent, offset, buffer[:count])
        return count
