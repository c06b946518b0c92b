"""Carries out tasks one after another: the buffers, reads, kernels and writes of one thread.

A window is filled with as few reads as its moves allow, then written with one call. If a checkpoint has very many small
tensors, a window contains a thousand, so they are handled together where possible. What only copies imports no kernels.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.engine.tasks import Piece, RowBlock, Task, Tile, Together, Window, is_dense
from ckptconv.plan import Checked, Data, Literal, Trailer
from ckptconv.storage.coalesce import BLOCK as NEARBY
from ckptconv.storage.coalesce import are_near, blocks
from ckptconv.storage.files import MAX_BUFFERS, Readers, is_read_far
from ckptconv.storage.reading import Reader
from ckptconv.storage.records import combine
from ckptconv.storage.writing import Writer
from ckptconv.tensors.lazy import Convert, Stored
from ckptconv.tensors.moves import GAP, Assembled, Cut, File, Gather, Kernel, Move, Runs
from ckptconv.text import some

if TYPE_CHECKING:
    from ckptconv.storage.reading import Sources

# Called with everything that is read for the output: the file, the runs in it, and their bytes.
Seen: TypeAlias = Callable[[File, Runs, memoryview], None]

# By name of a tensor: its CRC-32, or (offset, bytes, CRC-32) of every piece made so far.
Digested: TypeAlias = "dict[str, int | list[tuple[int, int, int]]]"

# Converted tensors of at most a window divided by this are read together and converted at once. The bytes of a number.
_SMALL, _NUMBER = 8, 8


@dataclass(eq=False, repr=False)
class Tally:
    """Figures of carrying out a plan: bytes read, written and verified, and by name of a tensor, how many of its values
    became infinite, and zero."""

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_verified: int = 0
    infinite: Counter[str] = field(default_factory=Counter)
    zero: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.bytes_verified += other.bytes_verified
        self.infinite.update(other.infinite)
        self.zero.update(other.zero)

    def lost(self, dtype: str) -> dict[str, str]:
        """Return a warning of the values that became "infinite" in a cast to `dtype`, and of those that became "zero".

        It names the tensors with most of them first.
        """
        warnings = {}
        if self.infinite:
            values, where = _summed(self.infinite)
            warnings["infinite"] = f"{values} too large for {dtype} and became infinite, in {where}."
        if self.zero:
            values, where = _summed(self.zero)
            warnings["zero"] = f"{values} too small for {dtype} and became zero, in {where}."
        return warnings


def _summed(counts: Mapping[str, int]) -> tuple[str, str]:
    """Return how many values there are, and in which tensors."""
    total = sum(counts.values())
    names = sorted(counts.keys() - {""}, key=lambda name: (-counts[name], name))
    return "1 value was" if total == 1 else f"{total:,} values were", some(names, 3) or "a tensor"


class Done(NamedTuple):
    """The results of a worker: its tally, the CRC-32 of its tensors, if requested, and the offsets of the trailers that
    it wrote."""

    tally: Tally
    digests: Digested | None
    trailers: set[int]


@dataclass(eq=False, repr=False)
class _Span:
    """Bytes `start` to `stop` of a file, and the sources in them, each with its index."""

    file: File
    start: int
    stop: int
    inside: list[tuple[int, Runs]]


@dataclass(eq=False, repr=False)
class _Alike:
    """Small conversions done at once, which make bytes `start` to `stop` of a window.

    `kernel` is applied to the `nbytes` bytes at `ranges` (offset, length) of `file`, one range for each tensor of
    `names`.
    """

    file: File
    kernel: Kernel
    start: int
    stop: int
    nbytes: int
    ranges: list[tuple[int, int]]
    names: list[str]


def _is_simple(tensor: Convert, start: int, stop: int) -> bool:
    """Whether bytes `start` to `stop` of `tensor` are whole elements, converted from elements dense in a file."""
    return (
        start < stop
        and is_dense(tensor.tensor)
        and not start % tensor.dtype.itemsize
        and not stop % tensor.dtype.itemsize
    )


def _add_alike(known: list[_Alike], tensor: Convert, name: str, start: int, stop: int, at: int, most: int) -> None:
    """Add the conversion that makes bytes `start` to `stop` of a tensor at byte `at` of the window to `known`.

    It joins the last entry if it continues that one and both together read at most `most` bytes.
    """
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
        last = _Alike(stored.file, tensor.kernel, at, at, 0, [], [])
        known.append(last)
    last.ranges.append((offset, nbytes))
    last.names.append(name)
    last.nbytes += nbytes
    last.stop += stop - start


class Worker:
    """The buffers of one thread: at most four of `unit`, the size of a window, or a tile, and two of `unit`.

    A window may need one, its reads two, and the results of its kernels one. A tile is read whole, and made and written
    piece by piece; if it cannot be, it has half the size. Moves that are assembled take another.
    """

    def __init__(
        self,
        readers: Sources,
        writer: Writer | None,
        unit: int,
        digesting: bool = False,
        seen: Seen | None = None,
    ) -> None:
        self.readers, self.writer, self.unit, self.seen = readers, writer, unit, seen
        self.fetches = not isinstance(readers, Readers)
        self.digests: Digested | None = {} if digesting else None
        self.window = memoryview(bytearray(unit))
        self.scratch = self.around = memoryview(b"")
        # Buffers of assembled moves, by how deep they are inside one another.
        self.assemblies: list[memoryview] = []
        self.depth = 0
        # The content of the first buffer, which the next tile may need again, as those of one row do; and the last
        # number that was computed from many, which every tile of a tensor may need.
        self.held: Assembled | None = None
        self.number: tuple[Any, bytes] = (None, b"")
        self.junk = memoryview(bytearray(GAP))
        self.tally = Tally()
        self.name = ""  # of the tensor that is being made
        self.trailers: set[int] = set()

    def run(self, task: Task) -> int:
        """Carry out `task`. Return the number of bytes written."""
        if isinstance(task, Together):
            return sum(map(self.run, task.windows))
        if isinstance(task, Trailer):
            # This worker has made all of the file's data.
            data = task.make(Digests(self.digests or {}))
            self.write(task.offset, memoryview(data))
            self.trailers.add(task.offset)
            size = len(data)
        elif isinstance(task, Window):
            size = self._fill(task)
        else:
            size = self.place(task) if isinstance(task, Tile) else self._divide(task)
        self.tally.bytes_written += size
        return size

    def done(self) -> Done:
        """Return the results, at the end."""
        if isinstance(self.readers, Readers):
            self.tally.bytes_read += self.readers.unpacked()
        return Done(self.tally, self.digests, self.trailers)

    def _fill(self, window: Window) -> int:
        out = self.assemble(window)
        if self.digests is not None:
            known = Digests(self.digests)
            for part, start, stop in window.pieces:
                base = part.offset - window.start
                if isinstance(part, Data):
                    self.digest(part, start, out[base + start : base + stop])
                elif isinstance(part, Trailer):
                    out[base:][:stop] = part.make(known)
                    self.trailers.add(part.offset)
        self.write(window.start, out)
        return len(out)

    def digest(self, part: Data, start: int, data: memoryview) -> None:
        """Add `data`, the bytes of `part` from `start` on, to its CRC-32."""
        from ckptconv.storage.crc import crc32  # files without a manifest have none

        assert self.digests is not None
        if not start and len(data) == part.nbytes:
            self.digests[part.name] = crc32(data)
            return
        pieces = self.digests.setdefault(part.name, [])
        assert isinstance(pieces, list)
        if pieces and pieces[-1][0] + pieces[-1][1] == start:
            first, size, crc = pieces.pop()
            pieces.append((first, size + len(data), crc32(data, crc)))
        else:
            pieces.append((start, len(data), crc32(data)))

    def bytes_of(self, part: Data, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop` of a tensor, valid until the next call."""
        return self.assemble(Window(part.offset + start, part.offset + stop, [Piece(part, start, stop)]))

    def write(self, offset: int, data: memoryview) -> None:
        assert self.writer is not None
        self.writer.write_at(offset, data)

    def assemble(self, window: Window) -> memoryview:
        """Return the bytes of `window`, in this worker's buffer: valid until the next call."""
        out = self.window[: window.stop - window.start]
        reads: dict[File, list[tuple[int, memoryview]]] = {}
        near: File | None = None
        ranges: list[tuple[int, memoryview]] = []
        alike: list[_Alike] = []
        begin, small = window.start, self.unit // _SMALL
        shape = strides = None
        for part, start, stop in window.pieces:
            base = part.offset - begin
            if type(part) is not Data:
                if isinstance(part, Literal):
                    out[base + start : base + stop] = part.data[start:stop]
                    continue
                if isinstance(part, Trailer):
                    continue  # computed from the bytes before it, at the end
            self.name = part.name if type(part) is Data else ""
            tensor = part.tensor
            # Many small tensors share these with the one before.
            if type(tensor) is Stored and tensor.file is near and tensor.shape is shape and tensor.strides is strides:
                ranges.append((tensor.offset + start, out[base + start : base + stop]))
                continue
            if type(tensor) is Convert and stop - start <= small and _is_simple(tensor, start, stop):
                _add_alike(alike, tensor, self.name, start, stop, base + start, self.unit)
                continue
            if is_dense(tensor):
                # Consecutive tensors are mostly in the same file, and looking one up takes time.
                if tensor.file is not near:
                    near = tensor.file
                    ranges = reads.setdefault(near, [])
                shape, strides = tensor.shape, tensor.strides
                ranges.append((tensor.offset + start, out[base + start : base + stop]))
                continue
            for move in tensor.moves(start, stop, "output", self.unit):
                target, file, source, steps = move
                if file is None or steps or target.grid or source.grid:  # type: ignore[union-attr]
                    to = out[base + target.offset : base + target.offset + target.length]
                    if target.grid:
                        _scatter(out, target.shifted(base), self._result(move))
                    else:
                        self._result(move, to)
                else:
                    to = out[base + target.offset : base + target.offset + target.length]
                    reads.setdefault(file, []).append((source.offset, to))  # type: ignore[union-attr]
        for file, ranges in reads.items():
            self.read(file, ranges)
        for conversion in alike:
            self.convert(conversion, out)
        return out

    def convert(self, alike: _Alike, out: memoryview) -> None:
        """Apply a kernel at once to small tensors that are adjacent in `out`."""
        from ckptconv.tensors import kernels

        self._make_room(alike.nbytes)
        packed = self.scratch[: alike.nbytes]
        ends = list(itertools.accumulate(length for _, length in alike.ranges))
        self.read(
            alike.file,
            [(at, packed[end - length : end]) for (at, length), end in zip(alike.ranges, ends, strict=True)],
        )
        made = out[alike.start : alike.stop]
        _, lost = kernels.apply((alike.kernel,), packed, made)
        if any(lost):
            # Once more for each tensor, as few have any.
            size, into = len(packed), len(made)
            for name, (_, length), end in zip(alike.names, alike.ranges, ends, strict=True):
                self.name, start = name, end - length
                self._applied((alike.kernel,), packed[start:end], made[start * into // size : end * into // size])

    def _applied(self, steps: Sequence[Kernel], data: memoryview, out: memoryview | None) -> memoryview:
        """Return `data` passed through kernels, and count what the tensor that is being made loses."""
        from ckptconv.tensors import kernels

        result, lost = kernels.apply(steps, data, out)
        if lost.infinite:
            self.tally.infinite[self.name] += lost.infinite
        if lost.zero:
            self.tally.zero[self.name] += lost.zero
        return result

    def place(self, tile: Tile) -> int:
        assert self.writer is not None
        self.name = tile.part.name
        target = tile.move.target.shifted(tile.part.offset)
        offsets, length = target.offsets(), target.length
        at = left = 0  # where the run begins that is not yet whole, and how much of it is missing
        for data in self._pieces(tile.move):
            if not left and not len(data) % length:
                self.writer.write_runs(itertools.islice(offsets, len(data) // length), length, data)
                continue
            while data:
                if not left:
                    at, left = next(offsets), length
                size = min(left, len(data))
                self.writer.write_at(at, data[:size])
                data, at, left = data[size:], at + size, left - size
        return target.nbytes

    def _pieces(self, move: Move) -> Iterator[memoryview]:
        """Yield the bytes that `move` makes, in the order of its target, each piece valid until the next.

        A move that only reorders and converts is made piece by piece, from bytes that were read at once.
        """

        gather, *steps = move.kernels or (None,)
        size = move.target.nbytes
        alone = not any(isinstance(kernel, (Gather, Cut)) for kernel in steps)
        if isinstance(gather, Gather) and isinstance(move.source, Runs) and alone:
            from ckptconv.tensors.geometry import slices

            item = size // math.prod(gather.shape)
            data = self._packed(move.file, move.source)
            for start, piece in slices(gather, self.unit // max(item, gather.itemsize)):
                out = self.window[: math.prod(piece.shape) * item]
                yield self._applied((piece, *steps), data[start:], out)
            return
        if move.kernels and len(self.window) < size:
            self.window = memoryview(bytearray(size))
        yield self._result(move, self.window[:size] if move.kernels else None)

    def _divide(self, block: RowBlock) -> int:
        """Read the sources of the pieces of `block` together, and write or check each tensor."""
        pieces = [
            (piece, list(piece.part.tensor.moves(piece.start, piece.stop, "output", self.unit)))
            for piece in block.pieces
            if not isinstance(piece.part, (Literal, Trailer))
        ]
        spans = iter(self._read_together([(move.file, move.source) for _, moves in pieces for move in moves]))
        written = 0
        for (part, start, stop), moves in pieces:
            out = self.window[: stop - start]
            self.name = part.name if isinstance(part, Data) else ""
            for move, data in zip(moves, spans, strict=False):
                target = move.target.shifted(-start)
                to = None if target.grid else out[target.offset : target.stop]
                result = self._result(move, to) if data is None else self._of_read(move, data, to)
                if target.grid:
                    _scatter(out, target, result)
            if isinstance(part, Data):
                self.write(part.offset + start, out)
                if self.digests is not None:
                    self.digest(part, start, out)
                written += len(out)
            elif isinstance(part, Checked):
                part.check(out)
        return written

    def _of_read(self, move: Move, data: memoryview, out: memoryview | None) -> memoryview:
        """Do as `_result`, with `data` as the bytes from the first run of the source to its last."""
        from ckptconv.tensors import kernels

        assert isinstance(move.source, Runs)
        picked = kernels.pick(data, move.source._replace(offset=0), None if move.kernels else out)
        return self._applied(move.kernels, picked, out)

    def _read_together(self, sources: list[tuple[File | None, Runs | bytes | Assembled]]) -> list[memoryview | None]:
        """Return for each of `sources` the bytes from its first run to its last, and read overlapping ones at once.

        The entry is None for a source that is not in a file; all are None if they are too much for the buffer.
        """
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
        """Return the bytes that `move` makes, in the order of its target; in `out`, if that is given."""

        if isinstance(move.source, Runs):
            data = self._packed(move.file, move.source)
        else:
            data = memoryview(move.source) if isinstance(move.source, bytes) else self._assembled(move.source)
        return self._applied(move.kernels, data, out)

    def _assembled(self, source: Assembled) -> memoryview:
        """Return the bytes that the moves of `source` make, not to be written to."""
        if not self.depth:
            if source == self.held:
                return self.assemblies[0][: source.nbytes].toreadonly()
            self.held = None
        if len(self.assemblies) == self.depth:
            self.assemblies.append(memoryview(b""))
        if len(self.assemblies[self.depth]) < source.nbytes:
            self.assemblies[self.depth] = memoryview(bytearray(source.nbytes))
        assembly = self.assemblies[self.depth][: source.nbytes]
        self.depth += 1
        try:
            for move in source.moves:
                target, file, inner, steps = move
                if file is not None and isinstance(inner, Runs) and not (steps or target.grid or inner.grid):
                    self.read(file, [(inner.offset, assembly[target.offset : target.stop])])
                elif isinstance(inner, Assembled) and target.nbytes <= _NUMBER:
                    if self.number[0] != (inner, steps):
                        self.number = (inner, steps), bytes(self._result(move))
                    _scatter(assembly, target, memoryview(self.number[1]))
                else:
                    _scatter(assembly, target, self._result(move))
        finally:
            self.depth -= 1
        if not self.depth:
            self.held = source
        return assembly.toreadonly()

    def _packed(self, file: File | None, source: Runs) -> memoryview:
        """Return the runs of `source`, packed one after the other."""
        assert file is not None
        size, length = source.nbytes, source.length
        self._make_room(size)
        packed = self.scratch[:size]
        with self.readers.reading(file) as reader:
            if are_near(source):
                self._pick(reader, source, packed)
            else:
                reader.fill_runs(source.offsets(), length, packed)
        self._count(file, size)
        if self.seen:
            self.seen(file, source, packed)
        return packed

    def _pick(self, reader: Reader, source: Runs, packed: memoryview) -> None:
        """Fill `packed` with the runs of `source`, which are short and near each other."""
        from ckptconv.tensors import kernels

        done = 0
        for block in blocks(source):
            size, span = block.nbytes, block.stop - block.offset
            if len(self.around) < span:
                self.around = memoryview(bytearray(max(span, NEARBY)))
            data = self.around[:span]
            reader.fill(block.offset, [data])
            out = packed[done : done + size]
            picked = kernels.pick(data, block._replace(offset=0), out)
            if not block.grid:
                out[:] = picked
            done += size

    def _make_room(self, size: int) -> None:
        if len(self.scratch) < size:
            self.scratch = memoryview(bytearray(size))

    def read(self, file: File, ranges: list[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset; read across small gaps instead of starting another read."""
        ranges.sort(key=itemgetter(0))
        skipped = self.junk
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
                    if gap != len(skipped):
                        skipped = self.junk[:gap]
                    buffers.append(skipped)
                buffers.append(to)
                end = offset + len(to)
            reader.fill(begin, buffers)
            self._count(file, end - begin)
        if self.seen:
            for offset, to in ranges:
                self.seen(file, Runs(offset, len(to)), to)

    def _count(self, file: File, size: int) -> None:
        # Packed and remote data was counted when it was unpacked or fetched.
        if file.packed is None and not (self.fetches and is_read_far(file)):
            self.tally.bytes_read += size


def _scatter(out: memoryview, target: Runs, data: memoryview) -> None:
    from ckptconv.tensors import kernels

    kernels.scatter(out, target, data)


class Digests(Mapping[str, int]):
    """The CRC-32 of every non-empty tensor, by name, combined from the pieces made so far."""

    def __init__(self, pieces: Mapping[str, int | list[tuple[int, int, int]]]) -> None:
        self._pieces = pieces

    def __getitem__(self, name: str) -> int:
        pieces = self._pieces[name]
        return pieces if isinstance(pieces, int) else combine(pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
