"""Converts tensors whose output differs from the stored bytes: by kernels, tiles, blocks of rows, many small casts.

Plain copies need neither this module nor kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptconv.engine.buffers import Buffers
from ckptconv.engine.tasks import RowBlock, Tile, is_dense
from ckptconv.plan import Checked, Data, Literal, Trailer
from ckptconv.storage.coalesce import BLOCK as NEARBY
from ckptconv.storage.coalesce import are_near, blocks
from ckptconv.storage.reading import Reader
from ckptconv.tensors import kernels
from ckptconv.tensors.lazy import Convert, Stored
from ckptconv.tensors.moves import GAP, Assembled, Cut, File, Gather, Kernel, Move, Runs

# Converted tensors up to a window divided by `_SMALL` are read together and converted at once. The bytes of a number.
_SMALL, _NUMBER = 8, 8


@dataclass(eq=False, repr=False)
class _Span:
    """Bytes `start` to `stop` of a file, and the sources in them, each with its index."""

    file: File
    start: int
    stop: int
    inside: list[tuple[int, Runs]]


@dataclass(eq=False, repr=False)
class Alike:
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


class Mover:
    """Makes bytes in the window of `buffers`, and in further buffers of its own: the reads of a window may need two of
    its size, and the results of its kernels one.

    A tile is read whole, and made and written piece by piece; if it cannot be, it has half the size. Moves that are
    assembled take another.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._scratch = self._around = memoryview(b"")
        # Buffers of assembled moves, by how deep they are inside one another.
        self._assemblies: list[memoryview] = []
        self._depth = 0
        # The content of the first buffer, which the next tile may need again, as those of one row do; and the last
        # number that was computed from many, which every tile of a tensor may need.
        self._held: Assembled | None = None
        self._number: tuple[Any, bytes] = (None, b"")

    def put(self, move: Move, out: memoryview, base: int) -> None:
        """Make the bytes of `move` in `out`, the window in which its tensor begins at byte `base`."""
        target = move.target.shifted(base)
        if target.grid:
            kernels.scatter(out, target, self._result(move))
        else:
            self._result(move, out[target.offset : target.stop])

    def is_small(self, tensor: Convert, start: int, stop: int) -> bool:
        """Return whether bytes `start` to `stop` of `tensor` are few whole elements, with a source dense in a file."""
        return (
            start < stop <= start + self._buffers.unit // _SMALL
            and is_dense(tensor.tensor)
            and not start % tensor.dtype.itemsize
            and not stop % tensor.dtype.itemsize
        )

    def note(self, known: list[Alike], tensor: Convert, start: int, stop: int, at: int) -> None:
        """Add the conversion that makes bytes `start` to `stop` of the tensor that is being made, at byte `at` of the
        window, to `known`.

        It joins the last entry if it continues that one and both together read at most a window.
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
            or last.nbytes + nbytes > self._buffers.unit
        ):
            last = Alike(stored.file, tensor.kernel, at, at, 0, [], [])
            known.append(last)
        last.ranges.append((offset, nbytes))
        last.names.append(self._buffers.name)
        last.nbytes += nbytes
        last.stop += stop - start

    def convert(self, alike: Alike, out: memoryview) -> None:
        """Apply a kernel at once to small tensors that are adjacent in `out`."""
        self._make_room(alike.nbytes)
        packed = self._scratch[: alike.nbytes]
        ends = list(itertools.accumulate(length for _, length in alike.ranges))
        self._buffers.read(
            alike.file,
            [(at, packed[end - length : end]) for (at, length), end in zip(alike.ranges, ends, strict=True)],
        )
        made = out[alike.start : alike.stop]
        _, lost = kernels.apply((alike.kernel,), packed, made)
        if any(lost):
            # Once more for each tensor, as few have any.
            size, into = len(packed), len(made)
            for name, (_, length), end in zip(alike.names, alike.ranges, ends, strict=True):
                self._buffers.name, start = name, end - length
                self._applied((alike.kernel,), packed[start:end], made[start * into // size : end * into // size])

    def _applied(self, steps: Sequence[Kernel], data: memoryview, out: memoryview | None) -> memoryview:
        """Return `data` passed through kernels, and count the values that the current tensor loses."""
        result, lost = kernels.apply(steps, data, out)
        tally, name = self._buffers.tally, self._buffers.name
        for became, count in lost._asdict().items() if any(lost) else ():
            if count:
                tally.lost_in[became][name] += count
        return result

    def place(self, tile: Tile) -> int:
        """Write a tile, and return its size."""
        assert self._buffers.writer is not None
        self._buffers.name = tile.part.name
        target = tile.move.target.shifted(tile.part.offset)
        offsets, length = target.offsets(), target.length
        at = left = 0  # where the run begins that is not yet whole, and how much of it is missing
        for data in self._pieces(tile.move):
            if not left and not len(data) % length:
                self._buffers.writer.write_runs(itertools.islice(offsets, len(data) // length), length, data)
                continue
            while data:
                if not left:
                    at, left = next(offsets), length
                size = min(left, len(data))
                self._buffers.writer.write_at(at, data[:size])
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
            for start, piece in slices(gather, self._buffers.unit // max(item, gather.itemsize)):
                out = self._buffers.window[: math.prod(piece.shape) * item]
                yield self._applied((piece, *steps), data[start:], out)
            return
        if move.kernels and len(self._buffers.window) < size:
            self._buffers.window = memoryview(bytearray(size))
        yield self._result(move, self._buffers.window[:size] if move.kernels else None)

    def divide(self, block: RowBlock) -> int:
        """Read the sources of the pieces of `block` together, and write or check each tensor."""
        pieces = [
            (piece, list(piece.part.tensor.moves(piece.start, piece.stop, "output", self._buffers.unit)))
            for piece in block.pieces
            if not isinstance(piece.part, (Literal, Trailer))
        ]
        spans = iter(self._read_together([(move.file, move.source) for _, moves in pieces for move in moves]))
        written = 0
        for (part, start, stop), moves in pieces:
            out = self._buffers.window[: stop - start]
            self._buffers.name = part.name if isinstance(part, Data) else ""
            for move, data in zip(moves, spans, strict=False):
                target = move.target.shifted(-start)
                to = None if target.grid else out[target.offset : target.stop]
                result = self._result(move, to) if data is None else self._of_read(move, data, to)
                if target.grid:
                    kernels.scatter(out, target, result)
            if isinstance(part, Data):
                self._buffers.write(part.offset + start, out)
                if self._buffers.crcs is not None:
                    self._buffers.crcs.add(part, start, out)
                written += len(out)
            elif isinstance(part, Checked):
                part.check(out)
        return written

    def _of_read(self, move: Move, data: memoryview, out: memoryview | None) -> memoryview:
        """Return what `_result` does, from `data`: the bytes from the first run of the move's source to its last."""
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
        if total > 2 * self._buffers.unit:
            return views
        self._make_room(total)
        at = 0
        for span in spans:
            file, start, stop = span.file, span.start, span.stop
            data = self._scratch[at : at + stop - start]
            with self._buffers.readers.reading(file) as reader:
                reader.fill(start, [data])
            self._buffers.count(file, stop - start)
            if self._buffers.seen:
                self._buffers.seen(file, Runs(start, stop - start), data)
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
        """Return the bytes that the moves of `source` make, read-only."""
        if not self._depth:
            if source == self._held:
                return self._assemblies[0][: source.nbytes].toreadonly()
            self._held = None
        if len(self._assemblies) == self._depth:
            self._assemblies.append(memoryview(b""))
        if len(self._assemblies[self._depth]) < source.nbytes:
            self._assemblies[self._depth] = memoryview(bytearray(source.nbytes))
        assembly = self._assemblies[self._depth][: source.nbytes]
        self._depth += 1
        try:
            for move in source.moves:
                target, file, inner, steps = move
                if file is not None and isinstance(inner, Runs) and not (steps or target.grid or inner.grid):
                    self._buffers.read(file, [(inner.offset, assembly[target.offset : target.stop])])
                elif isinstance(inner, Assembled) and target.nbytes <= _NUMBER:
                    if self._number[0] != (inner, steps):
                        self._number = (inner, steps), bytes(self._result(move))
                    kernels.scatter(assembly, target, memoryview(self._number[1]))
                else:
                    kernels.scatter(assembly, target, self._result(move))
        finally:
            self._depth -= 1
        if not self._depth:
            self._held = source
        return assembly.toreadonly()

    def _packed(self, file: File | None, source: Runs) -> memoryview:
        """Return the runs of `source`, packed one after the other."""
        assert file is not None
        size, length = source.nbytes, source.length
        self._make_room(size)
        packed = self._scratch[:size]
        with self._buffers.readers.reading(file) as reader:
            if are_near(source):
                self._pick(reader, source, packed)
            else:
                reader.fill_runs(source.offsets(), length, packed)
        self._buffers.count(file, size)
        if self._buffers.seen:
            self._buffers.seen(file, source, packed)
        return packed

    def _pick(self, reader: Reader, source: Runs, packed: memoryview) -> None:
        """Fill `packed` with the runs of `source`, which are short and near each other."""
        done = 0
        for block in blocks(source):
            size, span = block.nbytes, block.stop - block.offset
            if len(self._around) < span:
                self._around = memoryview(bytearray(max(span, NEARBY)))
            data = self._around[:span]
            reader.fill(block.offset, [data])
            out = packed[done : done + size]
            picked = kernels.pick(data, block._replace(offset=0), out)
            if not block.grid:
                out[:] = picked
            done += size

    def _make_room(self, size: int) -> None:
        if len(self._scratch) < size:
            self._scratch = memoryview(bytearray(size))
