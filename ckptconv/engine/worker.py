"""Carries out tasks one after another, for one thread.

A window is filled with as few reads as its moves allow, then written with one call. If a checkpoint has very many small
tensors, a window contains a thousand, so they are handled together where possible. What only copies imports no kernels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.engine.buffers import Buffers, Tally
from ckptconv.engine.tasks import Piece, Task, Tile, Together, Window, is_dense
from ckptconv.plan import Data, Literal, Trailer
from ckptconv.storage.files import Readers
from ckptconv.tensors.lazy import Convert, Stored
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from ckptconv.engine.crcs import Crcs
    from ckptconv.engine.moving import Alike, Mover


class Done(NamedTuple):
    """The results of a worker: its tally, the CRC-32 of its tensors, if requested, and the offsets of its trailers."""

    tally: Tally
    crcs: Crcs | None
    trailers: set[int]


class Worker(Buffers):
    """Carries out the tasks of one thread, in at most four buffers of `unit`, the size of a window, or a tile, and two
    of `unit`: its own, and those of the `mover`."""

    @functools.cached_property
    def mover(self) -> Mover:
        """The mover, for output that differs from the stored bytes."""
        from ckptconv.engine.moving import Mover

        return Mover(self)

    def run(self, task: Task) -> int:
        """Carry out `task`. Return the number of bytes written."""
        if isinstance(task, Together):
            return sum(map(self.run, task.windows))
        if isinstance(task, Trailer):
            # This worker has made all of the file's data.
            data = task.make(self.crcs or {})
            self.write(task.offset, memoryview(data))
            self.trailers.add(task.offset)
            size = len(data)
        elif isinstance(task, Window):
            size = self._fill(task)
        else:
            size = self.mover.place(task) if isinstance(task, Tile) else self.mover.divide(task)
        self.tally.bytes_written += size
        return size

    def done(self) -> Done:
        """Return the results, at the end."""
        if isinstance(self.readers, Readers):
            self.tally.bytes_read += self.readers.unpacked()
        return Done(self.tally, self.crcs, self.trailers)

    def _fill(self, window: Window) -> int:
        out = self.assemble(window)
        if self.crcs is not None:
            for part, start, stop in window.pieces:
                base = part.offset - window.start
                if isinstance(part, Data):
                    self.crcs.add(part, start, out[base + start : base + stop])
                elif isinstance(part, Trailer):
                    out[base:][:stop] = part.make(self.crcs)
                    self.trailers.add(part.offset)
        self.write(window.start, out)
        return len(out)

    def bytes_of(self, part: Data, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop` of a tensor, valid until the next call."""
        return self.assemble(Window(part.offset + start, part.offset + stop, [Piece(part, start, stop)]))

    def assemble(self, window: Window) -> memoryview:
        """Return the bytes of `window`, in this worker's buffer: valid until the next call."""
        out = self.window[: window.stop - window.start]
        reads: dict[File, list[tuple[int, memoryview]]] = {}
        near: File | None = None
        ranges: list[tuple[int, memoryview]] = []
        alike: list[Alike] = []
        begin = window.start
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
            if type(tensor) is Convert and self.mover.is_small(tensor, start, stop):
                self.mover.note(alike, tensor, start, stop, base + start)
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
                    self.mover.put(move, out, base)
                else:
                    to = out[base + target.offset : base + target.offset + target.length]
                    reads.setdefault(file, []).append((source.offset, to))  # type: ignore[union-attr]
        for file, ranges in reads.items():
            self.read(file, ranges)
        for conversion in alike:
            self.mover.convert(conversion, out)
        return out
