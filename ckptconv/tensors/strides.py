"""The arithmetic of shapes and strides. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence

# Limits of torch's tensors: dimensions, and bytes.
MAX_DIMS, MAX_BYTES = 64, 1 << 63


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-order tensor of `shape`, in elements, as torch counts them."""
    return _contiguous_strides(tuple(shape))


# There are many tensors, but few distinct shapes.
@functools.lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@functools.lru_cache(maxsize=4096)
def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements of `shape` with these `strides` (in elements) are dense and in C order."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1:
            if stride != step:
                return False
            step *= extent
    return True
