"""The memory that several tensors were views of, put together again from the views. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.tensors import (
    DTYPES,
    Concat,
    Convert,
    Inline,
    LazyTensor,
    Narrow,
    Stored,
    View,
    contiguous_strides,
    is_contiguous,
    untagged,
)

# Views of more separate runs than this are not taken apart: no model has them.
MAX_RUNS = 1_000_000
_ZEROS = 1 << 16
_BYTE = DTYPES["uint8"]


class Placed(NamedTuple):
    """A view: its elements in C order, and where they lie in the storage (offset and strides in elements)."""

    tensor: LazyTensor
    offset: int
    strides: tuple[int, ...]


def storage_of(views: Sequence[Placed], nbytes: int) -> LazyTensor:
    """The bytes of a storage of `nbytes` bytes that has `views` in it; what no view shows is zero.

    Raises UnsupportedError for views too scattered to be taken apart.
    """
    first = views[0]
    if len(views) == 1 and not first.offset and first.tensor.nbytes == nbytes and _flat(first):
        return _bytes(first.tensor)
    # Larger views first: what they show need not be taken from smaller ones.
    runs: list[tuple[int, LazyTensor]] = []
    covered: list[tuple[int, int]] = []
    for view in sorted(views, key=lambda view: -view.tensor.nbytes):
        for start, tensor in _runs(view):
            for low, high in _uncovered(covered, start, start + tensor.nbytes):
                runs.append(
                    (low, tensor if high - low == tensor.nbytes else Narrow(tensor, 0, low - start, high - low))
                )
                bisect.insort(covered, (low, high))
            if len(runs) > MAX_RUNS:
                raise UnsupportedError(f"A tensor is a view of its storage in more than {MAX_RUNS} separate runs.")
    parts: list[LazyTensor] = []
    at = 0
    for start, tensor in sorted(runs, key=lambda run: run[0]):
        parts.extend(_zeros(start - at))
        parts.append(tensor)
        at = start + tensor.nbytes
    parts.extend(_zeros(nbytes - at))
    return parts[0] if len(parts) == 1 else Concat(tuple(parts)) if parts else Inline(b"", _BYTE, (0,))


def _flat(view: Placed) -> bool:
    return is_contiguous(view.tensor.shape, view.strides)


def _bytes(tensor: LazyTensor) -> LazyTensor:
    return View(untagged(tensor), _BYTE, (tensor.nbytes,))


def _uncovered(covered: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of an interval that lie in none of `covered`, which are sorted and apart."""
    index = max(bisect.bisect_right(covered, (start, 1 << 64)) - 1, 0)
    found = []
    while index < len(covered) and covered[index][0] < stop:
        low, high = covered[index]
        if start < low:
            found.append((start, low))
        start = max(start, high)
        index += 1
    if start < stop:
        found.append((start, stop))
    return iter(found)


def _runs(view: Placed) -> Iterator[tuple[int, LazyTensor]]:
    """The dense runs of a view's elements in the storage: the byte each begins at, and its bytes."""
    tensor, item = untagged(view.tensor), view.tensor.dtype.itemsize
    if not tensor.numel:
        return
    # In the order of memory, a transposed view is as dense as any.
    dims = sorted(range(len(tensor.shape)), key=lambda dim: (-view.strides[dim], dim))
    dims = [dim for dim in dims if tensor.shape[dim] > 1]
    if any(view.strides[dim] == 0 for dim in dims):
        # A repeated element lies in the storage once.
        for dim in range(len(tensor.shape)):
            if tensor.shape[dim] > 1 and view.strides[dim] == 0:
                tensor = Narrow(tensor, dim, 0, 1)
        dims = [dim for dim in dims if view.strides[dim]]
    shape = tuple(tensor.shape[dim] for dim in dims)
    strides = tuple(view.strides[dim] for dim in dims)
    if dims != sorted(dims):
        tensor = _permuted(tensor, dims)
    inner = len(dims)
    run = 1
    while inner and strides[inner - 1] == run:
        inner -= 1
        run *= shape[inner]
    flat = _bytes(tensor)
    for number, index in enumerate(itertools.product(*map(range, shape[:inner]))):
        start = view.offset + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield start * item, Narrow(flat, 0, number * run * item, run * item)


def _permuted(tensor: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    """`tensor` with its dimensions in the order `dims`; those left out have one element."""
    if isinstance(tensor, Convert):
        return Convert(_permuted(tensor.tensor, dims), tensor.kernel, tensor.dtype)
    if isinstance(tensor, Stored):
        shape, strides = tensor.shape, tensor.strides
        return Stored(
            tensor.file,
            tensor.offset,
            tensor.dtype,
            tuple(shape[dim] for dim in dims),
            tuple(strides[dim] for dim in dims),
        )
    if isinstance(tensor, Narrow) and isinstance(tensor.tensor, Stored):
        whole = tensor.tensor
        offset = whole.offset + tensor.start * whole.strides[tensor.dim] * whole.dtype.itemsize
        return _permuted(Stored(whole.file, offset, whole.dtype, tensor.shape, whole.strides), dims)
    raise UnsupportedError("A transposed tensor that shares its storage cannot be put back in its place.")


def _zeros(nbytes: int) -> Iterator[LazyTensor]:
    block = Inline(bytes(_ZEROS), _BYTE, (_ZEROS,)) if nbytes >= _ZEROS else None
    if block is not None:
        yield from itertools.repeat(block, nbytes // _ZEROS)
    if nbytes % _ZEROS:
        yield Inline(bytes(nbytes % _ZEROS), _BYTE, (nbytes % _ZEROS,))


def strides_of(tensor: LazyTensor, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides as they are recorded, or those of a tensor in C order where none are."""
    return strides if len(strides) == len(tensor.shape) else contiguous_strides(tensor.shape)
