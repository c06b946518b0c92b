"""Reads the first bytes of a tensor while a checkpoint is described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.storage.packed import SpoolingReaders
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import Runs


def first_bytes(tensor: LazyTensor, limit: int, storage_options: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the first bytes of a tensor, at most `limit`, and the number of bytes that were read for them."""
    from ckptconv.tensors import kernels

    size, read = min(tensor.nbytes, limit), 0
    data = memoryview(bytearray(size))
    with SpoolingReaders(dict(storage_options)) as readers:
        for move in tensor.moves(0, size):
            packed = move.source
            if move.file is not None and isinstance(packed, Runs):
                with readers.reading(move.file) as reader:
                    packed = b"".join(reader.read_at(offset, packed.length) for offset in packed.offsets())
                read += len(packed)
            assert isinstance(packed, bytes)
            kernels.scatter(data, move.target, kernels.apply(move.kernels, packed)[0])
    return bytes(data), read
