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
    """Whether elements of `shape` laid out by `strides` (in elements) are dense and in C order."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1:
            if stride != step:
                return False
            step *= extent
    return True


def reshaped_strides(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of the same elements, in the same order, in the shape `wanted`; None if there are none."""
    runs: list[list[int]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if runs and runs[-1][1] == extent * stride:
            runs[-1] = [runs[-1][0] * extent, stride]
        else:
            runs.append([extent, stride])
    result: list[int] = []
    left, step = 1, 1
    for extent in reversed(wanted):
        if extent != 1 and left == 1:
            if not runs:
                return None
            left, step = runs.pop()
        if left % max(extent, 1) or not extent:
            return None
        result.append(step)
        left, step = left // extent, step * extent
    return tuple(reversed(result)) if left == 1 and not runs else None
