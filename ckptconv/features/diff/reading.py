"""Reads pairs of tensors, and measures their differences: block by block, in bounded memory, with the engine's threads.

Bytes are compared first; only blocks that differ are measured. The norms of a tensor that differs need its equal blocks
too: those before the first difference are read again, on one side.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from ckptconv.engine.execute import in_processes
from ckptconv.engine.tasks import ALIGNMENT, Piece, Window
from ckptconv.engine.threads import in_threads
from ckptconv.engine.worker import Worker
from ckptconv.features.diff.changes import Change, Measured, Squares, Tolerance, compared, squares_of, value, widened
from ckptconv.features.pairs.elements import place_of, shown
from ckptconv.features.pairs.runs import Run, runs
from ckptconv.options.table import Options
from ckptconv.plan import Data
from ckptconv.process import is_forkable, settled
from ckptconv.storage.files import Readers, is_far
from ckptconv.storage.packed import packed
from ckptconv.storage.progress import Progress
from ckptconv.storage.reading import Sources
from ckptconv.storage.stores import reached
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import LazyTensor

# Bytes of both sides together that are compared at a time: the most, and the fewest, if memory is small, that are worth
# a thread of its own. A thread has up to four times that in buffers.
UNIT, _LEAST_UNIT, _BUFFERS = 1 << 20, 1 << 16, 4
_MOST_JOBS = 4
# The most runs of small tensors that are read together.
_MOST_RUNS = 512
# Bytes of both sides for which starting processes is worth while.
WORTH_PROCESSES = 1 << 26
# Tasks that a process takes at once.
_FEW = 8
# A longer list of runs is merged.
_RUNS = 256
# Words that are compared before all others.
_SOON = 1 << 12


@dataclass(slots=True)
class Pair:
    """Two tensors of one shape, whose elements are comparable, and their measured differences.

    `found` is None while all bytes are equal. `runs` were equal before that was known, and are not measured yet.
    """

    one: LazyTensor
    other: LazyTensor
    found: Measured | None = None
    first: tuple[int, bytes, bytes] | None = None
    runs: list[Run] | None = None

    @property
    def dtypes(self) -> tuple[DType, DType]:
        return self.one.dtype, self.other.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of both tensors."""
        return self.one.nbytes + self.other.nbytes

    def change(self) -> Change | None:
        """Return the differences; None if all bytes are equal."""
        if self.found is None:
            return None
        place, values = None, ("", "")
        if self.first is not None:
            index, *bits = self.first
            place = place_of(index, self.one.shape)
            values = (shown(self.one.dtype, bits[0], value), shown(self.other.dtype, bits[1], value))
        return self.found.change(place, values, numbers=bool(widened(*self.dtypes)))


class Encoding(Protocol):
    """An encoder for the changes of pairs that are being compared: a context manager."""

    def check(self, pairs: Mapping[str, Pair]) -> None:
        """Raise an error for pairs, by name, that cannot be encoded."""

    def add(self, pair: Pair, a: memoryview, b: memoryview, is_equal: bool) -> None:
        """Take the next bytes of a pair."""

    def reserve(self, count: int) -> None:
        """Prepare to be copied into so many processes."""

    def share(self, number: int) -> None:
        """From now on, work in process `number` of these, for the pairs that the process takes."""

    def done(self) -> Any:
        """Return the result of encoding in this process."""

    def include(self, done: Any) -> None:
        """Take the result of encoding in another process."""


class _Done(NamedTuple):
    """The work of a process: the bytes read, the differences by the numbers of pairs, and the encoded changes."""

    bytes_read: int
    found: list[tuple[int, Measured | None, tuple[int, bytes, bytes] | None, list[Run] | None]]
    encoded: Any


class _Part(NamedTuple):
    """A run of a pair in a task, and the places of its bytes of each side in the window."""

    pair: Pair
    run: Run
    one: slice
    other: slice


class _Task(NamedTuple):
    """Runs that are read together. The first `size` bytes of the window are those of one side; those from `half` on are
    the other side's, if that is read at all.

    `bitwise`: runs with equal bytes are equal.
    """

    window: Window
    parts: list[_Part]
    size: int
    half: int
    bitwise: bool


def compare(
    pairs: Sequence[Pair],
    options: Options,
    tolerance: Tolerance | None = None,
    progress: Progress | None = None,
    on_total: Callable[[int], object] | None = None,
    encoder: Encoding | None = None,
    measure: bool = True,
) -> int:
    """Compare the elements of `pairs`, and put the differences into each. Return the bytes read.

    `progress` and `on_total` get the bytes of both sides. `encoder` gets the bytes of each pair in order. Without
    `measure`, a pair only records whether elements differ. Raise the errors of reading a file.
    """
    if on_total:
        on_total(sum(pair.nbytes for pair in pairs))
    numpy_module()
    far = any(is_far(file.stored.path) for pair in pairs for side in (pair.one, pair.other) for file in side.inputs())
    jobs = 1 if far else options.jobs or min(os.cpu_count() or 1, _MOST_JOBS)
    memory = options.buffers(far)
    unit = min(UNIT, max(memory // jobs // _BUFFERS, _LEAST_UNIT))
    jobs = min(jobs, max(memory // (_BUFFERS * unit), 1))
    with settled(), Readers(dict(options.storage_options), options.spool_dir) as readers:
        readers.expect(packed(tensor for pair in pairs for tensor in (pair.one, pair.other)))
        # A conversion keeps the other half for uploads.
        comparing = _Comparing(readers, unit, jobs, memory // 2 if far else 0, tolerance, progress, encoder, measure)
        comparing.carry_out(
            pairs,
            lambda: _in_order(pairs, unit) if encoder else _one_by_one(_tasks(_runs(pairs, unit), unit)),
            sum(pair.nbytes for pair in pairs),
        )
        comparing.measure_only()
        left = [pair for pair in pairs if pair.runs and pair.found and widened(*pair.dtypes)]
        passed = [(pair, pair.runs or []) for pair in left]
        for pair in pairs:
            pair.runs = None
        comparing.carry_out(
            left,
            lambda: _one_by_one(_tasks(_cut(passed, unit), unit, measuring=True)),
            sum(pair.one.nbytes for pair in left),
        )
        return comparing.bytes_read + readers.bytes_unpacked


# -------------------------------------------------------------------------------------------------------------- tasks


def _runs(pairs: Iterable[Pair], unit: int) -> Iterator[tuple[Pair, Run]]:
    """Yield the runs that cover all pairs, in the order of their first side's files."""
    for pair in sorted(pairs, key=lambda pair: pair.one.origin()):
        for run in runs(pair.one, pair.other, unit):
            yield pair, run


def _in_order(pairs: Iterable[Pair], unit: int) -> Iterator[Iterable[_Task]]:
    """Yield the tasks that cover all pairs, each element in C order. One thread takes a group's tasks, in order."""
    small: list[Pair] = []
    size = 0
    for pair in sorted(pairs, key=lambda pair: pair.one.origin()):
        if small and size + pair.nbytes > unit:
            yield _tasks(_whole(small, unit), unit)
            small, size = [], 0
        if pair.one.numel:
            small.append(pair)
            size += pair.nbytes
    if small:
        yield _tasks(_whole(small, unit), unit)


def _whole(pairs: Sequence[Pair], unit: int) -> Iterator[tuple[Pair, Run]]:
    """Yield the runs that cover all pairs in C order."""
    for pair in pairs:
        yield from ((pair, run) for run in _within(Run(0, pair.one.numel), pair, unit))


def _one_by_one(tasks: Iterable[_Task]) -> Iterator[Iterable[_Task]]:
    """Yield tasks that threads may take in any order."""
    return ((task,) for task in tasks)


def _several(groups: Iterator[Iterable[_Task]], few: int) -> Iterator[Iterable[_Task]]:
    """Yield several groups as one: after each of these, a process reports to the first one."""
    while taken := list(itertools.islice(groups, few)):
        yield itertools.chain.from_iterable(taken)


def _within(run: Run, pair: Pair, unit: int) -> Iterator[Run]:
    """Cut a run into runs that fit a window."""
    return run.cut(max(unit // sum(dtype.itemsize for dtype in pair.dtypes), 1))


def _cut(passed: Iterable[tuple[Pair, list[Run]]], unit: int) -> Iterator[tuple[Pair, Run]]:
    """Yield the runs of pairs that were not measured."""
    for pair, left in passed:
        for run in left:
            yield from ((pair, part) for part in ((run,) if run.box else _within(run, pair, unit)))


def _tasks(runs: Iterable[tuple[Pair, Run]], unit: int, measuring: bool = False) -> Iterator[_Task]:
    """Yield the tasks: small tensors are read together. `measuring`: only the first side is read."""
    taken: list[tuple[Pair, Run]] = []
    size = 0
    for pair, run in runs:
        item = pair.one.dtype.itemsize + pair.other.dtype.itemsize
        length = (run.stop - run.start) * item
        if taken and (size + length > unit or len(taken) == _MOST_RUNS):
            yield _task(taken, measuring)
            taken, size = [], 0
        taken.append((pair, run))
        size += length
    if taken:
        yield _task(taken, measuring)


def _task(taken: Sequence[tuple[Pair, Run]], measuring: bool) -> _Task:
    size = sum((run.stop - run.start) * pair.one.dtype.itemsize for pair, run in taken)
    stop, half = size, -(-size // ALIGNMENT) * ALIGNMENT
    at_a, at_b = 0, half
    ones: list[Piece] = []
    others: list[Piece] = []
    parts = []
    for pair, run in taken:
        first, second = _slice(at_a, run, pair.one.dtype), _slice(at_b, run, pair.other.dtype)
        at_a, at_b = first.stop, second.stop
        parts.append(_Part(pair, run, first, second))
        ones.append(_piece(run.of(pair.one), run, first))
        if not measuring:
            others.append(_piece(run.of(pair.other), run, second))
            stop = second.stop
    bitwise = all(pair.one.dtype == pair.other.dtype for pair, _ in taken)
    return _Task(Window(0, stop, [*ones, *others]), parts, size, half, bitwise)


def _slice(start: int, run: Run, dtype: DType) -> slice:
    return slice(start, start + (run.stop - run.start) * dtype.itemsize)


def _piece(tensor: LazyTensor, run: Run, place: slice) -> Piece:
    """Return the piece that puts a run of `tensor` at `place` of a window that begins at 0."""
    item = tensor.dtype.itemsize
    start, stop = run.start * item, run.stop * item
    return Piece(Data(place.start - start, tensor, ""), start, stop)


# ----------------------------------------------------------------------------------------------------------- comparing


class _Comparing:
    """Carries out tasks of at most `unit` bytes, in `jobs` processes or threads. If a file is remote, there is one
    thread, and `ahead` bytes are prefetched for it; else `ahead` is 0. `bytes_read` counts the bytes read."""

    def __init__(
        self,
        readers: Readers,
        unit: int,
        jobs: int,
        ahead: int,
        tolerance: Tolerance | None,
        progress: Progress | None,
        encoder: Encoding | None,
        measure: bool,
    ) -> None:
        self._readers, self._unit, self._jobs, self._ahead = readers, unit, jobs, ahead
        self._tolerance, self._progress, self._encoder, self._measure = tolerance, progress, encoder, measure
        self._lock = threading.Lock()
        self.bytes_read = 0

    def measure_only(self) -> None:
        """From now on, report no progress and encode nothing: sides of blocks are read again, to measure them."""
        self._progress = self._encoder = None

    def carry_out(self, pairs: Sequence[Pair], groups: Callable[[], Iterator[Iterable[_Task]]], nbytes: int) -> None:
        """Carry out `groups()` of tasks for `pairs`, the same each time, which read about `nbytes`."""
        if self._ahead:
            far = reached("")
            needs = far.needs(self._unit)
            with far.prefetching(self._readers, lambda task: needs(task.window), memory=self._ahead) as prefetch:
                workers = [self._worker(prefetch)]
                workers[0].run(prefetch.over(itertools.chain.from_iterable(groups())))
            self.bytes_read += prefetch.bytes_fetched
        else:
            jobs = min(self._jobs, nbytes // self._unit + 1)
            if jobs > 1 and nbytes >= WORTH_PROCESSES and self._forked(pairs, groups, jobs):
                return
            workers = [self._worker(self._readers) for _ in range(jobs)]
            in_threads(groups(), workers, None)
        self.bytes_read += sum(worker.bytes_read for worker in workers)

    def _forked(self, pairs: Sequence[Pair], groups: Callable[[], Iterator[Iterable[_Task]]], jobs: int) -> bool:
        """Carry out tasks in processes. Return whether that was possible; then all are done."""
        packed = (file for pair in pairs for side in (pair.one, pair.other) for file in side.inputs() if file.packed)
        if not is_forkable() or any(packed):
            return False
        if self._encoder:
            self._encoder.reserve(jobs)
        # Groups with an encoder are large.
        few = 1 if self._encoder else _FEW
        workers = [partial(self._alone, pairs, number) for number in range(jobs)]
        ended = in_processes(lambda: _several(groups(), few), workers, self._progress)
        for done in ended:
            self.bytes_read += done.bytes_read
            for index, measured, first, left in done.found:
                pair = pairs[index]
                if measured:
                    _add(pair, measured)
                _meet(pair, first)
                for run in left or ():
                    pair.runs = _appended(pair.runs or [], run)
            if self._encoder:
                self._encoder.include(done.encoded)
        return bool(ended)

    def _alone(self, pairs: Sequence[Pair], number: int) -> _Alone:
        """Return a worker for process `number`, which is a copy of this process."""
        if self._encoder:
            self._encoder.share(number)
        self._progress = None  # the first process reports progress
        return _Alone(self._worker(self._readers), pairs, self._encoder)

    def _worker(self, readers: Sources) -> _Worker:
        worker = Worker(readers, None, self._unit + ALIGNMENT)
        return _Worker(worker, self._tolerance, self._lock, self._progress, self._encoder, self._measure)


class _Worker:
    """Compares the bytes that an engine's worker reads, instead of writing them. `lock` guards the pairs."""

    def __init__(
        self,
        worker: Worker,
        tolerance: Tolerance | None,
        lock: threading.Lock,
        progress: Progress | None,
        encoder: Encoding | None,
        measure: bool,
    ) -> None:
        self._worker, self._tolerance, self._lock = worker, tolerance, lock
        self._progress, self._encoder, self._is_measuring = progress, encoder, measure

    @property
    def bytes_read(self) -> int:
        """The bytes read so far."""
        return self._worker.tally.bytes_read

    def run(self, group: Iterable[_Task]) -> int:
        """Compare the runs of tasks. Return the bytes read for them."""
        total = 0
        for task in group:
            size = self._run(task)
            total += size
            if self._progress:
                self._progress(size)
        return total

    def _run(self, task: _Task) -> int:
        if not self._is_measuring and not self._encoder and all(map(_is_told, task.parts)):
            return task.size + task.window.stop - task.half
        data = self._worker.assemble(task.window)
        side_a, side_b = data[: task.size], data[task.half :]
        if not side_b:
            for part in task.parts:
                self._measure(part, data)
        elif task.bitwise and _same(side_a, side_b):
            for part in task.parts:
                self._pass(part, data)
        else:
            for part in task.parts:
                self._compare(part, data, may_be_equal=len(task.parts) > 1)
        return len(side_a) + len(side_b)

    def _pass(self, part: _Part, data: memoryview) -> None:
        """Note an equal run. It is measured at once if its tensors are known to differ."""
        pair = part.pair
        self._encode(part, data, is_equal=True)
        if not self._is_measuring:
            return
        with self._lock:
            known = pair.found is not None
            if not known and part.run.stop - part.run.start < pair.one.numel:
                pair.runs = _appended(pair.runs or [], part.run)
        if known:
            self._measure(part, data)

    def _encode(self, part: _Part, data: memoryview, is_equal: bool) -> None:
        if self._encoder:
            self._encoder.add(part.pair, data[part.one], data[part.other], is_equal)

    def _measure(self, part: _Part, data: memoryview) -> None:
        """Add the squares of a run that is equal on both sides."""
        squares = squares_of(data[part.one], part.pair.one.dtype)
        with self._lock:
            _add(part.pair, Measured(squares=Squares(a=squares, b=squares)))

    def _compare(self, part: _Part, data: memoryview, may_be_equal: bool) -> None:
        pair, side_a, side_b = part.pair, data[part.one], data[part.other]
        if may_be_equal and pair.one.dtype == pair.other.dtype and _same(side_a, side_b):
            self._pass(part, data)
            return
        self._encode(part, data, is_equal=False)
        if not self._is_measuring and self._tolerance is None and pair.one.dtype == pair.other.dtype:
            with self._lock:
                pair.found = Measured(1)  # or more
            return
        measured = compared(side_a, side_b, pair.dtypes, self._tolerance)
        first = None
        if measured.first is not None:
            bits = (
                bytes(side[measured.first * dtype.itemsize :][: dtype.itemsize])
                for side, dtype in zip((side_a, side_b), pair.dtypes, strict=True)
            )
            first = part.run.number(measured.first, pair.one.shape), next(bits), next(bits)
        with self._lock:
            _add(pair, measured)
            _meet(pair, first)


class _Alone:
    """Compares in a process of its own, where nothing is known of `pairs` yet."""

    def __init__(self, worker: _Worker, pairs: Sequence[Pair], encoder: Encoding | None) -> None:
        self._worker, self._pairs, self._encoder = worker, pairs, encoder
        for pair in pairs:
            pair.found = pair.first = pair.runs = None

    def run(self, group: Iterable[_Task]) -> int:
        """Compare the runs of tasks. Return the bytes read for them."""
        return self._worker.run(group)

    def done(self) -> _Done:
        """Return the differences and the encoded changes of this process."""
        results = [
            (index, pair.found, pair.first, pair.runs)
            for index, pair in enumerate(self._pairs)
            if pair.found or pair.runs
        ]
        return _Done(self._worker.bytes_read, results, self._encoder and self._encoder.done())


def _is_told(part: _Part) -> bool:
    """Return whether the elements of the pair are known to differ."""
    return bool(part.pair.found and part.pair.found.elements)


def _meet(pair: Pair, first: tuple[int, bytes, bytes] | None) -> None:
    """Note an element that differs, unless one before it does."""
    if first is not None and (pair.first is None or first < pair.first):
        pair.first = first


def _add(pair: Pair, measured: Measured) -> None:
    if pair.found is None:
        pair.found = measured
    else:
        pair.found.add(measured)


def _appended(runs: list[Run], run: Run) -> list[Run]:
    """Return `runs` with `run`; touching runs in C order are merged. Blocks end about in their order."""
    if runs and run.box is None and runs[-1].stop == run.start:
        runs[-1] = Run(runs[-1].start, run.stop)
        return runs
    runs.append(run)
    if run.box is not None or len(runs) < _RUNS:
        return runs
    merged: list[Run] = []
    for known in sorted(runs):
        if merged and merged[-1].stop == known.start:
            merged[-1] = Run(merged[-1].start, known.stop)
        else:
            merged.append(known)
    return merged


def _same(left: memoryview | bytes, right: memoryview | bytes) -> bool:
    """Return whether two runs of bytes, of one length, are equal."""
    import numpy as np

    whole = len(left) // 8
    first, second = (np.frombuffer(data, "u8", whole) for data in (left, right))
    # Unequal runs mostly differ soon.
    return all((first[part] == second[part]).all() for part in (slice(_SOON), slice(_SOON, None))) and (
        left[8 * whole :] == right[8 * whole :]
    )
