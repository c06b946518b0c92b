"""Reads tensors without writing them, and compares two of them."""

from __future__ import annotations

from ckptconv.engine.worker import Worker
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import BLOCK


class TensorReader:
    """Reads the bytes of a tensor, at most `limit` at a time."""

    def __init__(self, tensor: LazyTensor, readers: Readers, limit: int = BLOCK) -> None:
        self._data = Data(0, tensor, "")
        self._worker = Worker(readers, None, limit)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop`, valid until the next call."""
        return self._worker.bytes_of(self._data, start, stop)

    @property
    def bytes_read(self) -> int:
        """The number of bytes read from files."""
        return self._worker.tally.bytes_read


def same(left: LazyTensor, right: LazyTensor, readers: Readers) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    mine, theirs = TensorReader(left, readers), TensorReader(right, readers)
    return all(
        mine.read(start, stop) == theirs.read(start, stop)
        for start, stop in ((at, min(at + BLOCK, left.nbytes)) for at in range(0, left.nbytes, BLOCK))
    )
