"""Read the bytes of a tensor block by block."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.engine.tasks import ALIGNMENT, Piece, Window
from ckptconv.engine.worker import Worker
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.tensors.lazy import LazyTensor


def blocks_of(tensor: LazyTensor, readers: Readers, step: int) -> Iterator[memoryview]:
    """Yield the bytes of `tensor`, `step` at a time. A block lives until the next."""
    step = min(step, tensor.nbytes)
    worker = Worker(readers, None, step + ALIGNMENT)
    for start in range(0, tensor.nbytes, max(step, 1)):
        stop = min(start + step, tensor.nbytes)
        yield worker.assemble(Window(0, stop - start, [Piece(Data(-start, tensor, ""), start, stop)]))
