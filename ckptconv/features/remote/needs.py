"""The remote ranges that tasks of the engine read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptconv.engine.tasks import RowBlock, Task, Tile, Window
from ckptconv.plan import Literal, Trailer
from ckptconv.storage.coalesce import blocks
from ckptconv.storage.files import is_read_far
from ckptconv.storage.reading import Range
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import BLOCK, Assembled, File, Move, Runs

# The runs of a strided tensor are fetched with the gaps between them if that is at most so many times the wanted bytes.
SPARSE = 4


class Needs:
    """Gives the remote ranges that a task reads.

    For a scattered tensor, that is everything from its first byte to its last: nearly every task reads throughout it.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._whole: tuple[LazyTensor, list[Range]] | None = None

    def __call__(self, task: Task) -> Iterator[Range]:
        if isinstance(task, Tile):
            yield from self._around(task.part.tensor) or _read_by([task.move])
        elif isinstance(task, (Window, RowBlock)):
            for part, start, stop in task.pieces:
                if not isinstance(part, (Literal, Trailer)):
                    tensor = part.tensor
                    whole = self._around(tensor) if tensor.nbytes > self._unit and tensor.scattered else []
                    yield from whole or _read_by(tensor.moves(start, stop, "output", self._unit))

    def _around(self, tensor: LazyTensor) -> list[Range]:
        """Return the range from the first to the last byte of a tensor, in each of its files.

        Return no ranges if they have more than `SPARSE` times the tensor's bytes.
        """
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
        if isinstance(source, Assembled):
            yield from _read_by(source.moves)
        if file is None or not isinstance(source, Runs) or not is_read_far(file):
            continue
        stop = source.stop
        if stop - source.offset <= SPARSE * source.nbytes:
            yield Range(file, source.offset, stop)
        else:
            yield from (Range(file, block.offset, block.stop) for block in blocks(source))
