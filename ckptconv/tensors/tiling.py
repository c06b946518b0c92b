"""Tiles of a tensor that the files have in another order than the output: each is moved separately. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ckptconv.tensors.geometry import tiles
from ckptconv.tensors.lazy import Composed, Concat, Convert, Derived, LazyTensor, Stored, Tagged, View
from ckptconv.tensors.moves import Assembled, Move
from ckptconv.tensors.strides import contiguous_strides

# Parts of a joined tensor with shorter contiguous runs are put together before they are written.
_LONG = 4096


def is_interleaved(tensor: LazyTensor) -> bool:
    """Return whether a tensor is joined from parts that alternate every few bytes."""
    if isinstance(tensor, Concat):
        rows = math.prod(tensor.shape[: tensor.dim])
        short = any(0 < part.nbytes < _LONG * rows for part in tensor.parts)
        return (rows > 1 and (short or not all(map(_is_plain, tensor.parts)))) or any(map(is_interleaved, tensor.parts))
    return isinstance(tensor, (Tagged, View, Convert)) and is_interleaved(tensor.tensor)


def _is_plain(tensor: LazyTensor) -> bool:
    return _is_plain(tensor.tensor) if isinstance(tensor, (Tagged, Convert)) else isinstance(tensor, Stored)


def joined_tiles(tensor: LazyTensor, limit: int) -> Iterator[Move]:
    """Yield moves of at most `limit` bytes that make all of `tensor`, each a block of it.

    The elements of a block are read from all parts, and put together before it is written.
    """
    from ckptconv.tensors.slices import Steps, opened, strided

    tensor = opened(tensor)
    item = tensor.dtype.itemsize
    for target, starts, counts in tiles(tensor.shape, _strides(tensor), max(limit // item, 1), item):
        block = strided(tensor, starts, [Steps(count, dim, 1) for dim, count in enumerate(counts)])
        moves = tuple(block.moves(0, block.nbytes, "output", limit))
        yield Move(target, None, Assembled(moves, block.nbytes))


def _strides(tensor: LazyTensor) -> tuple[int, ...]:
    """Return the distances between the elements of a tensor in its first file, as far as they are known.

    The parts of a joined tensor are far apart.
    """
    if isinstance(tensor, Stored):
        return tensor.strides
    if isinstance(tensor, Concat):
        strides = list(_strides(tensor.parts[0]))
        strides[tensor.dim] = max(strides[tensor.dim], tensor.numel)
        return tuple(strides)
    if isinstance(tensor, Derived) and tensor.tensor.shape == tensor.shape:
        return _strides(tensor.tensor)
    if isinstance(tensor, Composed) and tensor.parts[0].shape == tensor.shape:
        return _strides(tensor.parts[0])
    return contiguous_strides(tensor.shape)
