"""Reads the first bytes of a tensor while a checkpoint is described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.engine.tasks import ALIGNMENT
from ckptconv.engine.worker import Worker
from ckptconv.plan import Data
from ckptconv.storage.packed import SpoolingReaders
from ckptconv.tensors.lazy import LazyTensor


def first_bytes(tensor: LazyTensor, limit: int, storage_options: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the first bytes of a tensor, at most `limit`, and the number of bytes that were read for them."""
    size = min(tensor.nbytes, limit)
    with SpoolingReaders(dict(storage_options)) as readers:
        worker = Worker(readers, None, size + ALIGNMENT)
        data = bytes(worker.bytes_of(Data(0, tensor, ""), 0, size))
        return data, worker.done().tally.bytes_read
