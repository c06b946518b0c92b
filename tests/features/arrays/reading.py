"""What is read of an opened checkpoint: random slices, and what is expected of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import numpy as np
import torch

import ckptconv

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


def mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a file that is mapped into memory."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith((".safetensors", ".pt"))]
    return any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in spans)
