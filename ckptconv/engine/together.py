"""Read the bytes of tensors block by block, several tensors in step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptconv.engine.tasks import ALIGNMENT, Piece, Window
from ckptconv.engine.worker import Worker
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.tensors.lazy import LazyTensor


def blocks_of(tensors: Sequence[LazyTensor], readers: Readers, step: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of `tensors`, which have equally many, `step` at a time of each. A block lives until the next."""
    nbytes = tensors[0].nbytes
    step = min(step, nbytes)
    worker = Worker(readers, None, len(tensors) * step + ALIGNMENT)
    for start in range(0, nbytes, max(step, 1)):
        stop = min(start + step, nbytes)
        parts = [Data(number * step - start, tensor, "") for number, tensor in enumerate(tensors)]
        size = (len(tensors) - 1) * step + stop - start
        data = worker.assemble(Window(0, size, [Piece(part, start, stop) for part in parts]))
        yield [data[number * step :][: stop - start] for number in range(len(tensors))]
