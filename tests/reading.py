"""Reading checkpoints through the library: random slices, what is expected of them, and the bytes that are read."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any
from unittest import mock

import numpy as np
import torch
from checkpoints import load_with_aliases

import ckptconv

KIB = 1 << 10
Key = tuple["int | slice | EllipsisType | None", ...]
# So many slices of each tensor are compared.
SLICES = 20
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def random_key(rng: random.Random, shape: tuple[int, ...]) -> Key:
    """Something that a tensor of this shape can be indexed by."""
    key: list[Any] = []
    for extent in shape:
        if extent and rng.random() < 0.25:
            key.append(rng.randrange(-extent, extent))
        else:
            ends = [None, *(rng.randint(-extent - 1, extent + 1) for _ in range(3))]
            key.append(slice(rng.choice(ends), rng.choice(ends), rng.choice([None, 1, 1, 2, 3, 7, -1, -2])))
    if rng.random() < 0.3:
        first = rng.randint(0, len(key))
        key[first : rng.randint(first, len(key))] = [...]
    if rng.random() < 0.2:
        key.insert(rng.randint(0, len(key)), None)
    return tuple(key)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements as unsigned integers: numpy takes slices of these that torch does not, and NaN equals itself."""
    tensor = tensor.detach().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.dtype.itemsize]).numpy()


def converted(checkpoint: object, place: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of a conversion, as safetensors itself reads them, under all their names."""
    ckptconv.convert(checkpoint, place, fsync=False, **options)  # type: ignore[arg-type]
    return load_with_aliases(place)


def assert_reads(checkpoint: ckptconv.Checkpoint, expected: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Every tensor, and random slices of each, are those that are expected: by torch and by numpy."""
    rng = random.Random(seed)
    assert set(checkpoint) == set(expected)
    for name, tensor in expected.items():
        lazy, whole = checkpoint[name], bits(tensor)
        got = checkpoint.get_tensor(name)
        assert (got.dtype, got.shape, lazy.shape) == (tensor.dtype, tensor.shape, tuple(tensor.shape)), name
        assert np.array_equal(bits(got), whole), name
        if not tensor.is_complex():
            assert np.array_equal(lazy.numpy(raw=True), whole), name
        for _ in range(SLICES):
            key = random_key(rng, lazy.shape)
            part, wanted = bits(lazy[key]), whole[(*key, slice(None)) if tensor.is_complex() and ... in key else key]
            assert part.shape == wanted.shape, (name, key)
            assert np.array_equal(part, wanted), (name, key)


class Reads:
    """What was read of local files since it was made."""

    def __init__(self) -> None:
        self.nbytes = self.calls = 0


@contextmanager
def counted() -> Iterator[Reads]:
    """Count the bytes that the operating system reads for this process from files."""
    reads = Reads()
    preadv, pread = os.preadv, os.pread

    def counting_preadv(*args: Any) -> int:
        count = preadv(*args)
        reads.nbytes, reads.calls = reads.nbytes + count, reads.calls + 1
        return count

    def counting_pread(*args: Any) -> bytes:
        data = pread(*args)
        reads.nbytes, reads.calls = reads.nbytes + len(data), reads.calls + 1
        return data

    with mock.patch.object(os, "preadv", counting_preadv), mock.patch.object(os, "pread", counting_pread):
        yield reads


def mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a file that is mapped into memory."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith((".safetensors", ".pt"))]
    return any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in spans)
