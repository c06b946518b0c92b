"""Reads the first bytes of a tensor while a checkpoint is described."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ckptconv.engine.tasks import ALIGNMENT
from ckptconv.engine.worker import Worker
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.tensors.lazy import LazyTensor

CODES = {  # of `struct`, by dtype
    "bool": "?", "int8": "b", "uint8": "B", "int16": "<h", "uint16": "<H", "int32": "<i", "uint32": "<I", "int64": "<q",
    "uint64": "<Q", "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip


def first_bytes(tensor: LazyTensor, limit: int, storage_options: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the first bytes of a tensor, at most `limit`, and the number of bytes that were read for them."""
    size = min(tensor.nbytes, limit)
    with Readers(dict(storage_options)) as readers:
        worker = Worker(readers, None, size + ALIGNMENT)
        data = bytes(worker.bytes_of(Data(0, tensor, ""), 0, size))
        return data, worker.done().tally.bytes_read


def number_in(value: Any, storage_options: Mapping[str, Any]) -> Any:
    """Return the number that a tensor of one element holds; any other value unchanged."""
    if not isinstance(value, LazyTensor) or value.numel != 1 or value.dtype.name not in CODES:
        return value
    return struct.unpack(CODES[value.dtype.name], first_bytes(value, value.nbytes, storage_options)[0])[0]
