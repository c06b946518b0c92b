"""Carries a plan out: buffers, threads, and the order of reads and writes. Knows no format.

An output file is made window by window. A window is an interval of the output no larger than a buffer: it is filled
from as few reads as its moves allow, then written with one call. Windows are independent of each other, so threads
take them as they come. A tensor whose bytes lie in another order than the output wants them (a transpose) is instead
moved as tiles, each written wherever it belongs. Tensors that are columns of the same rows are moved as stripes: a few
rows are read once, and what each tensor takes of them is written where it belongs.

Where a file is read from far away, or is written from beginning to end, one thread takes the windows in order: others
fetch what the next ones need, and send what was made.
"""

from __future__ import annotations

import itertools
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeAlias, TypeGuard

from . import kernels
from .ahead import REQUESTS, Ahead, Range, is_read_far
from .crc import combine
from .plan import Blank, Data, FilePlan, Late, Literal, NotBlankError
from .spool import SpoolingReaders
from .storage import MAX_BUFFERS, Readers, Writer
from .tensors import BLOCK, GAP, Convert, File, Kernel, Lane, LazyTensor, Move, Runs, Stored, Together, lane

Progress: TypeAlias = Callable[[int], None]
# Told of everything that is read for the output: the file, where in it, and what is there.
Seen: TypeAlias = Callable[[File, Runs, memoryview], None]

# Cuts inside a tensor fall on multiples of this, so that they never cut an element.
ALIGNMENT = 64
# Threads are given small stacks: eight of the usual 8 MiB would count as 64 MiB of memory.
STACK = 512 << 10
# Converted tensors of less than a window by this are read together, and converted at once.
_SMALL = 8
# What lies between the runs of a strided tensor is fetched along from far away, up to so many times what is wanted.
SPARSE = 4


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a part."""

    part: Literal | Data | Blank
    start: int
    stop: int


class Window(NamedTuple):
    """Bytes `start` to `stop` of the output file, and the pieces they consist of."""

    start: int
    stop: int
    pieces: list[Piece]


class Tile(NamedTuple):
    """A move whose result is written run by run, to where `part` is in the output file."""

    part: Data
    move: Move


class Stripe(NamedTuple):
    """Pieces of several tensors that are made of the same bytes, which are read once."""

    pieces: list[Piece]


Task: TypeAlias = Window | Tile | Stripe | Late


@dataclass
class Tally:
    """What carrying out a plan took: bytes read, written and verified, and finite values that became infinite."""

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_verified: int = 0
    overflows: int = 0

    def add(self, other: Tally) -> None:
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.bytes_verified += other.bytes_verified
        self.overflows += other.overflows


def tasks(file: FilePlan, unit: int, positioned: bool) -> Iterator[Task]:
    """The work that makes `file`, in windows of at most `unit` bytes, and tiles of at most twice that. What comes late
    comes in its place where the file is not `positioned`, and else not at all."""
    pieces: list[Piece] = []
    start = at = 0
    groups = _sharing_rows(file, unit) if positioned else []
    shared = {id(part) for group in groups for part, _ in group}
    for part in file.parts:
        if part.offset != at:
            raise ValueError(f"{file.name}: a part begins at {part.offset}, and the one before ends at {at}")
        size = part.nbytes
        at += size
        if isinstance(part, Late):
            if pieces:
                yield Window(start, part.offset, pieces)
            pieces, start = [], at
            if not positioned:
                yield part
            continue
        if id(part) in shared:
            if pieces:
                yield Window(start, part.offset, pieces)
            pieces, start = [], at
            continue
        if isinstance(part, Blank):
            nbytes = part.tensor.nbytes
            yield from (Stripe([Piece(part, low, min(low + unit, nbytes))]) for low in range(0, nbytes, unit))
            continue
        if positioned and size > unit and isinstance(part, Data) and part.tensor.scattered:
            if pieces:
                yield Window(start, part.offset, pieces)
            for move in part.tensor.moves(0, size, "source", 2 * unit):
                yield Tile(part, move)
            pieces, start = [], at
            continue
        done = 0
        while done < size:
            room = start + unit - part.offset - done
            # A cut inside a small tensor costs two reads: begin a new window with it instead.
            take = size - done if size - done <= room else room // ALIGNMENT * ALIGNMENT if size > unit else 0
            if take:
                pieces.append(Piece(part, done, done + take))
                done += take
            if not take or part.offset + done - start >= unit:
                yield Window(start, part.offset + done, pieces)
                pieces, start = [], part.offset + done
    if pieces:
        yield Window(start, at, pieces)
    for group in groups:
        yield from _stripes(group, unit)
    if at != file.size:
        raise ValueError(f"{file.name}: its parts end at {at}, and its size is {file.size}")


_Shared: TypeAlias = "tuple[Data | Blank, Lane]"


def _sharing_rows(file: FilePlan, unit: int) -> list[list[_Shared]]:
    """Groups of the parts of `file` that lie beside each other in the same rows, of which they take most."""
    lanes = [
        (part, found)
        for part in file.parts
        if isinstance(part, (Data, Blank)) and not _is_dense(part.tensor) and (found := lane(part.tensor)) is not None
    ]
    groups: dict[object, list[list[_Shared]]] = {}
    for part, found in sorted(lanes, key=lambda each: each[1].offsets):
        known = groups.setdefault(found.rows, [])
        if known and found.beside(known[-1][0][1]):
            known[-1].append((part, found))
        else:
            known.append([(part, found)])
    return [group for known in groups.values() for group in known if _worth_sharing(group, unit)]


def _is_dense(tensor: LazyTensor) -> TypeGuard[Stored]:
    """What most tensors are, and all of 200,000 may be: bytes of a file as they lie."""
    return type(tensor) is Stored and tensor.contiguous


def _worth_sharing(group: list[_Shared], unit: int) -> bool:
    """Whether reading `group` at once costs less than reading each of it, which reads along small gaps only."""
    _, (rows, _) = group[0]
    widest = max(distance for _, _, distance in rows)
    taken = sum(part.tensor.nbytes for part, _ in group)
    return len(group) > 1 and widest <= unit and 2 * taken >= sum(count * distance for _, count, distance in rows)


def _stripes(group: list[_Shared], unit: int) -> Iterator[Stripe]:
    """`group` in stripes of as many rows as `unit` bytes hold."""
    _, (rows, _) = group[0]
    count = sum(count for _, count, _ in rows)
    step = unit // max(distance for _, _, distance in rows)
    widths = [(part, part.tensor.nbytes // count) for part, _ in group]
    for first in range(0, count, step):
        last = min(first + step, count)
        yield Stripe([Piece(part, first * width, last * width) for part, width in widths])


@dataclass
class _Span:
    """Bytes `start` to `stop` of a file, and the sources inside it, by number."""

    file: File
    start: int
    stop: int
    inside: list[tuple[int, Runs]]


@dataclass
class _Alike:
    """What makes bytes `start` to `stop` of a window: `kernel`, of `nbytes` bytes that lie at `ranges` (position,
    length) of `file`, of one tensor after the other."""

    file: File
    kernel: Kernel
    start: int
    stop: int
    nbytes: int
    ranges: list[tuple[int, int]]


def _add_alike(known: list[_Alike], tensor: Convert, start: int, stop: int, at: int, most: int) -> None:
    """Have bytes `start` to `stop` of `tensor`, which is stored as it lies, made at `at`, together with what is made
    before them, unless that takes more than `most` bytes."""
    stored = tensor.tensor
    assert isinstance(stored, Stored)
    before, after = stored.dtype.itemsize, tensor.dtype.itemsize
    nbytes = (stop - start) // after * before
    offset = stored.offset + start // after * before
    last = known[-1] if known else None
    if (
        last is None
        or (last.file, last.kernel, last.stop) != (stored.file, tensor.kernel, at)
        or (last.nbytes + nbytes > most)
    ):
        last = _Alike(stored.file, tensor.kernel, at, at, 0, [])
        known.append(last)
    last.ranges.append((offset, nbytes))
    last.nbytes += nbytes
    last.stop += stop - start


class _Worker:
    """One thread's buffers: at most four of `unit`, the size of a window.

    A window may take one, what is read for it two, and what kernels make of that another; a tile is made of two, and
    makes two.
    """

    def __init__(
        self,
        readers: Readers | Ahead[Task],
        writer: Writer | None,
        unit: int,
        digesting: bool = False,
        seen: Seen | None = None,
    ) -> None:
        self.readers, self.writer, self.unit, self.seen = readers, writer, unit, seen
        self.fetches = isinstance(readers, Ahead)
        # By the name of the tensor, its CRC-32; or position, bytes and CRC-32 of every piece made.
        self.digests: dict[str, int | list[tuple[int, int, int]]] | None = {} if digesting else None
        self.window = memoryview(bytearray(unit))
        self.scratch = memoryview(b"")
        self.junk = memoryview(bytearray(GAP))
        self.tally = Tally()

    def run(self, task: Task) -> int:
        """Carry out `task`; the bytes it wrote."""
        if isinstance(task, Late):
            # All of its data was made by this worker.
            data = task.make(_Digests(self.digests or {}))
            self._write(task.offset, memoryview(data))
            size = len(data)
        elif isinstance(task, Window):
            size = self._fill(task)
        else:
            size = self._place(task) if isinstance(task, Tile) else self._divide(task)
        self.tally.bytes_written += size
        return size

    def _fill(self, window: Window) -> int:
        out = self._assemble(window)
        self._write(window.start, out)
        if self.digests is not None:
            for part, start, stop in window.pieces:
                if isinstance(part, Data):
                    base = part.offset - window.start
                    self._digest(part, start, out[base + start : base + stop])
        return len(out)

    def _digest(self, part: Data, start: int, data: memoryview) -> None:
        """Take note of `data`, the bytes of `part` from `start` on."""
        assert self.digests is not None
        if not start and len(data) == part.nbytes:
            self.digests[part.name] = zlib.crc32(data)
            return
        made = self.digests.setdefault(part.name, [])
        assert isinstance(made, list)
        if made and made[-1][0] + made[-1][1] == start:
            first, size, crc = made.pop()
            made.append((first, size + len(data), zlib.crc32(data, crc)))
        else:
            made.append((start, len(data), zlib.crc32(data)))

    def bytes_of(self, part: Data, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of a tensor, valid until the next call."""
        return self._assemble(Window(part.offset + start, part.offset + stop, [Piece(part, start, stop)]))

    def _write(self, offset: int, data: memoryview) -> None:
        assert self.writer is not None
        self.writer.write_at(offset, data)

    def _assemble(self, window: Window) -> memoryview:
        """The bytes of `window`, in this worker's buffer."""
        out = self.window[: window.stop - window.start]
        reads: dict[File, list[tuple[int, memoryview]]] = {}
        near: File | None = None
        ranges: list[tuple[int, memoryview]] = []
        alike: list[_Alike] = []
        for part, start, stop in window.pieces:
            base = part.offset - window.start
            if isinstance(part, Literal):
                out[base + start : base + stop] = part.data[start:stop]
                continue
            tensor = part.tensor
            if type(tensor) is Convert and _is_dense(tensor.tensor) and stop - start <= self.unit // _SMALL:
                _add_alike(alike, tensor, start, stop, base + start, self.unit)
                continue
            if _is_dense(tensor):
                # One after the other they mostly lie in one file, whose name takes time to look up.
                if tensor.file is not near:
                    near = tensor.file
                    ranges = reads.setdefault(near, [])
                ranges.append((tensor.offset + start, out[base + start : base + stop]))
                continue
            for move in tensor.moves(start, stop, "output", self.unit):
                target, file, source, steps = move
                if file is None or steps or target.grid or source.grid:  # type: ignore[union-attr]
                    to = out[base + target.offset : base + target.offset + target.length]
                    if target.grid:
                        kernels.scatter(out, target.shifted(base), self._result(move))
                    else:
                        self._result(move, to)
                else:
                    to = out[base + target.offset : base + target.offset + target.length]
                    reads.setdefault(file, []).append((source.offset, to))  # type: ignore[union-attr]
        for file, ranges in reads.items():
            self._read(file, ranges)
        for each in alike:
            self._convert(each, out)
        return out

    def _convert(self, alike: _Alike, out: memoryview) -> None:
        """Pass small tensors that lie one after the other in `out` through their kernel at once."""
        self._make_room(alike.nbytes)
        packed = self.scratch[: alike.nbytes]
        ends = list(itertools.accumulate(length for _, length in alike.ranges))
        self._read(
            alike.file,
            [(at, packed[end - length : end]) for (at, length), end in zip(alike.ranges, ends, strict=True)],
        )
        _, overflows = kernels.apply((alike.kernel,), packed, out[alike.start : alike.stop])
        self.tally.overflows += overflows

    def _place(self, tile: Tile) -> int:
        target = tile.move.target
        size = target.nbytes
        if len(self.window) < size:
            self.window = memoryview(bytearray(size))
        result = self._result(tile.move, self.window[:size])
        assert self.writer is not None
        self.writer.write_runs(target.shifted(tile.part.offset).offsets(), target.length, result)
        return size

    def _divide(self, stripe: Stripe) -> int:
        """Read what the pieces of `stripe` are made of, and write each; or check it, if it is to be blank."""
        pieces = [
            (piece, list(piece.part.tensor.moves(piece.start, piece.stop, "output", self.unit)))
            for piece in stripe.pieces
            if not isinstance(piece.part, Literal)
        ]
        found = iter(self._read_together([(move.file, move.source) for _, moves in pieces for move in moves]))
        written = 0
        for (part, start, stop), moves in pieces:
            out = self.window[: stop - start]
            for move, data in zip(moves, found, strict=False):
                target = move.target.shifted(-start)
                to = None if target.grid else out[target.offset : target.stop]
                result = self._result(move, to) if data is None else self._of_read(move, data, to)
                if target.grid:
                    kernels.scatter(out, target, result)
            if isinstance(part, Data):
                self._write(part.offset + start, out)
                if self.digests is not None:
                    self._digest(part, start, out)
                written += len(out)
            elif isinstance(part, Blank) and not kernels.is_zero(out):
                raise NotBlankError(f"{part.name} holds something, and was to be left out.")
        return written

    def _of_read(self, move: Move, data: memoryview, out: memoryview | None) -> memoryview:
        """As `_result`, where all from the first run of the source to its last is read already."""
        assert isinstance(move.source, Runs)
        picked = kernels.pick(data, move.source._replace(offset=0), None if move.kernels else out)
        result, overflows = kernels.apply(move.kernels, picked, out)
        self.tally.overflows += overflows
        return result

    def _read_together(self, sources: list[tuple[File | None, Runs | bytes | Together]]) -> list[memoryview | None]:
        """For each of `sources` the bytes from its first run to its last, read with those of the others that overlap;
        None for what is in no file, and for all where they are too much for the buffer."""
        order = sorted(
            (file.path, runs.offset, index, file, runs)
            for index, (file, runs) in enumerate(sources)
            if file is not None and isinstance(runs, Runs)
        )
        spans: list[_Span] = []
        for _, _, index, file, runs in order:
            if not spans or spans[-1].file != file or runs.offset > spans[-1].stop + GAP:
                spans.append(_Span(file, runs.offset, runs.stop, []))
            spans[-1].stop = max(spans[-1].stop, runs.stop)
            spans[-1].inside.append((index, runs))
        views: list[memoryview | None] = [None] * len(sources)
        total = sum(span.stop - span.start for span in spans)
        if total > 2 * self.unit:
            return views
        self._make_room(total)
        at = 0
        for span in spans:
            file, start, stop = span.file, span.start, span.stop
            data = self.scratch[at : at + stop - start]
            with self.readers.reading(file) as reader:
                reader.fill(start, [data])
            self._count(file, stop - start)
            if self.seen:
                self.seen(file, Runs(start, stop - start), data)
            for index, runs in span.inside:
                views[index] = data[runs.offset - start : runs.stop - start]
            at += stop - start
        return views

    def _result(self, move: Move, out: memoryview | None = None) -> memoryview:
        """The bytes that `move` makes, in its target's order; put into `out`, if that is given."""
        if isinstance(move.source, Runs):
            data = self._packed(move.file, move.source)
        else:
            data = memoryview(move.source) if isinstance(move.source, bytes) else self._together(move.source)
        result, overflows = kernels.apply(move.kernels, data, out)
        self.tally.overflows += overflows
        return result

    def _together(self, source: Together) -> memoryview:
        """What the moves of `source` make."""
        made = memoryview(bytearray(source.nbytes))
        for move in source.moves:
            kernels.scatter(made, move.target, self._result(move))
        return made

    def _packed(self, file: File | None, source: Runs) -> memoryview:
        """The runs of `source`, one after the other."""
        assert file is not None
        size, length = source.nbytes, source.length
        self._make_room(size)
        packed = self.scratch[:size]
        with self.readers.reading(file) as reader:
            reader.fill_runs(source.offsets(), length, packed)
        self._count(file, size)
        if self.seen:
            self.seen(file, source, packed)
        return packed

    def _make_room(self, size: int) -> None:
        if len(self.scratch) < size:
            self.scratch = memoryview(bytearray(size))

    def _read(self, file: File, ranges: list[tuple[int, memoryview]]) -> None:
        """Fill the buffers from their offsets, reading along small gaps instead of beginning anew."""
        ranges.sort(key=itemgetter(0))
        with self.readers.reading(file) as reader:
            begin = end = ranges[0][0]
            buffers: list[memoryview] = []
            for offset, to in ranges:
                gap = offset - end
                if gap < 0 or gap > GAP or len(buffers) > MAX_BUFFERS - 2:
                    reader.fill(begin, buffers)
                    self._count(file, end - begin)
                    begin, buffers = offset, []
                elif gap:
                    buffers.append(self.junk[:gap])
                buffers.append(to)
                end = offset + len(to)
            reader.fill(begin, buffers)
            self._count(file, end - begin)
        if self.seen:
            for offset, to in ranges:
                self.seen(file, Runs(offset, len(to)), to)

    def _count(self, file: File, size: int) -> None:
        # What was packed, or came from far away, was counted when it was read for this.
        if file.packed is None and not (self.fetches and is_read_far(file)):
            self.tally.bytes_read += size


def carry_out(
    file: FilePlan,
    writer: Writer,
    readers: Readers,
    *,
    jobs: int,
    memory: int,
    progress: Progress | None = None,
    seen: Seen | None = None,
    digests: dict[str, int] | None = None,
    requests: int = REQUESTS,
) -> Tally:
    """Make `file` with `writer`. `memory` (bytes) bounds the buffers of all `jobs` threads together. From far away,
    so many `requests` are under way at a time.

    `seen` is told of every piece of data that is read, by any of the threads. The CRC-32 of every tensor that is not
    empty is put into `digests`, by name, if that is given.
    """
    digesting = file.digested or digests is not None
    far = _reads_far(file)
    if far or not writer.positioned:
        worker = _in_order(file, writer, readers, memory, progress, seen, requests if far else 0, digesting)
        if digesting:
            _finish(file, writer, [worker], worker.tally, {} if digests is None else digests)
        return worker.tally
    if file.size <= BLOCK:
        jobs = 1  # there is nothing to share
    # Four of these is what a worker holds at most.
    unit = max(min(BLOCK, memory // jobs // 4, file.size + ALIGNMENT) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    queue = tasks(file, unit, writer.positioned)
    workers = [_Worker(readers, writer, unit, digesting, seen) for _ in range(jobs)]
    if jobs == 1:
        for task in queue:
            size = workers[0].run(task)
            if progress:
                progress(size)
    else:
        _in_threads(queue, workers, progress)
    total = Tally()
    for worker in workers:
        total.add(worker.tally)
    if digesting:
        _finish(file, writer, workers, total, {} if digests is None else digests)
    return total


def _reads_far(file: FilePlan) -> bool:
    # The files of a tensor lie all in one place, and may be many.
    seen: set[File] = set()
    before: tuple[File, ...] = ()
    for part in file.parts:
        if isinstance(part, Data):
            inputs = part.tensor.inputs()
            if inputs and inputs != before:
                seen.add(inputs[0])
                before = inputs
    return any(map(is_read_far, seen))


def _in_order(
    file: FilePlan,
    writer: Writer,
    readers: Readers,
    memory: int,
    progress: Progress | None,
    seen: Seen | None,
    requests: int,
    digesting: bool,
) -> _Worker:
    """Make `file` from beginning to end in this thread, while others read what comes next, with `requests` at a
    time, or none if it is all near."""
    unit = max(min(BLOCK, memory // 4, file.size + ALIGNMENT) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    queue = tasks(file, unit, writer.positioned)
    if not requests:
        worker = _Worker(readers, writer, unit, digesting, seen)
        _take(queue, worker, progress)
    else:
        assert isinstance(readers, SpoolingReaders)
        needs = _Needs(unit)
        with Ahead(readers, readers.spool, needs, memory=memory, requests=requests) as ahead:
            worker = _Worker(ahead, writer, unit, digesting, seen)
            _take(ahead.over(queue), worker, progress)
        worker.tally.bytes_read += ahead.bytes_fetched
    return worker


def _take(queue: Iterator[Task], worker: _Worker, progress: Progress | None) -> None:
    for task in queue:
        size = worker.run(task)
        if progress:
            progress(size)


class _Needs:
    """What a task reads from far away, as ranges.

    A scattered tensor needs all that lies between its first byte and its last: nearly every task reads here and there
    in all of it.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._whole: tuple[LazyTensor, list[Range]] | None = None

    def __call__(self, task: Task) -> Iterator[Range]:
        if isinstance(task, Tile):
            yield from self._around(task.part.tensor) or _read_by([task.move])
        elif isinstance(task, (Window, Stripe)):
            for part, start, stop in task.pieces:
                if not isinstance(part, Literal):
                    tensor = part.tensor
                    whole = self._around(tensor) if tensor.nbytes > self._unit and tensor.scattered else []
                    yield from whole or _read_by(tensor.moves(start, stop, "output", self._unit))

    def _around(self, tensor: LazyTensor) -> list[Range]:
        """All between the first and the last byte of a tensor, in each of its files; nothing if most of it is not
        the tensor's."""
        if self._whole is None or self._whole[0] is not tensor:
            ends: dict[File, tuple[int, int]] = {}
            for file, start, stop in _read_by(tensor.moves(0, tensor.nbytes, "source", BLOCK)):
                low, high = ends.get(file, (start, stop))
                ends[file] = min(low, start), max(high, stop)
            ranges = [Range(file, start, stop) for file, (start, stop) in ends.items()]
            if sum(stop - start for _, start, stop in ranges) > SPARSE * tensor.nbytes:
                ranges = []
            self._whole = tensor, ranges
        return self._whole[1]


def _read_by(moves: Iterable[Move]) -> Iterator[Range]:
    for move in moves:
        file, source = move.file, move.source
        if isinstance(source, Together):
            yield from _read_by(source.moves)
        if file is None or not isinstance(source, Runs) or not is_read_far(file):
            continue
        stop = source.stop
        if stop - source.offset <= SPARSE * source.nbytes:
            yield Range(file, source.offset, stop)
        else:
            yield from (Range(file, offset, offset + source.length) for offset in source.offsets())


def _finish(file: FilePlan, writer: Writer, workers: Sequence[_Worker], total: Tally, digests: dict[str, int]) -> None:
    """Put the CRC-32 of the tensors into `digests`, and write what is known only now that they are."""
    pieces: dict[str, list[tuple[int, int, int]]] = {}
    for worker in workers:
        for name, made in (worker.digests or {}).items():
            if isinstance(made, int):
                digests[name] = made
            else:
                pieces.setdefault(name, []).extend(made)
        worker.digests = None
    digests.update((name, combine(made)) for name, made in pieces.items())
    for part in file.parts:
        # What was moved as tiles never was in order in memory: it is read again while the system still has it there.
        if isinstance(part, Data) and part.nbytes and part.name not in digests:
            crc = 0
            for at in range(0, part.nbytes, BLOCK):
                crc = zlib.crc32(writer.read_at(part.offset + at, min(BLOCK, part.nbytes - at)), crc)
            digests[part.name] = crc
    for part in file.parts if writer.positioned else ():
        if isinstance(part, Late):
            writer.write_at(part.offset, memoryview(part.make(digests)))
            total.bytes_written += part.nbytes


class _Digests(Mapping[str, int]):
    """The CRC-32 of every tensor that is not empty, by name, of the pieces that were made of it so far."""

    def __init__(self, pieces: Mapping[str, int | list[tuple[int, int, int]]]) -> None:
        self._pieces = pieces

    def __getitem__(self, name: str) -> int:
        made = self._pieces[name]
        return made if isinstance(made, int) else combine(made)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


class TensorReader:
    """Reads a tensor's bytes, at most `limit` at a time."""

    def __init__(self, tensor: LazyTensor, readers: Readers, limit: int = BLOCK) -> None:
        self._data = Data(0, tensor, "")
        self._worker = _Worker(readers, None, limit)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop`, valid until the next call."""
        return self._worker.bytes_of(self._data, start, stop)

    @property
    def bytes_read(self) -> int:
        """How many bytes were read from files."""
        return self._worker.tally.bytes_read


def same(one: LazyTensor, other: LazyTensor, readers: Readers) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    mine, theirs = TensorReader(one, readers), TensorReader(other, readers)
    return all(
        mine.read(start, stop) == theirs.read(start, stop)
        for start, stop in ((at, min(at + BLOCK, one.nbytes)) for at in range(0, one.nbytes, BLOCK))
    )


def _in_threads(queue: Iterator[Task], workers: list[_Worker], progress: Progress | None) -> None:
    taking, stop = threading.Lock(), threading.Event()
    failures: list[BaseException] = []

    def work(worker: _Worker) -> None:
        try:
            while not stop.is_set():
                with taking:
                    task = next(queue, None)
                if task is None:
                    return
                size = worker.run(task)
                if progress:
                    progress(size)
        except BaseException as error:
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    try:
        usual = threading.stack_size(STACK)
        # A signal comes before a thread is started or after it, and to none of those that are.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:
            pass
        finally:
            threading.stack_size(usual)
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        if threads[0].ident is None:
            # No room for another: those that run do the work, or else this one.
            work(workers[0])
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    except BaseException:
        # A signal: let every thread finish the piece at hand before the staging area is removed under it.
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if failures:
        raise failures[0]
