"""Joins the chunks of a tensor into one expression, and proves that they cover it exactly. Pure.

Sharding cuts a tensor by planes: into rows (Shard(0)), columns (Shard(1)), tiles, or interleaved blocks. `join` undoes
it: it cuts the tensor along all planes of a dimension that cross no chunk, and cuts each part again until it is one
chunk. This proves that nothing is missing or stored twice: in the end, exactly one chunk fills each region.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import Concat, Inline, LazyTensor

Shape: TypeAlias = tuple[int, ...]

# The most cuts of a region along each dimension. A grid takes one cut; blocks that are each a grid take two.
_CUTS = 2
# The most chunks that are compared with each other for a reason why they cannot be joined.
_COMPARED = 512


class Box(NamedTuple):
    """A part of a tensor: its first index, and its extent, in each dimension."""

    offsets: Shape
    sizes: Shape


class ChunkTile(NamedTuple):
    """A box of a tensor that begins at `offsets`, and its data."""

    offsets: Shape
    tensor: LazyTensor

    def start(self, dim: int) -> int:
        return self.offsets[dim]

    def stop(self, dim: int) -> int:
        return self.offsets[dim] + self.tensor.shape[dim]


class _MisfitError(Exception):
    """The reason why chunks cannot be joined to a region, and the error to raise for it."""

    def __init__(self, reason: str, error: type[CkptconvError] = CorruptError) -> None:
        super().__init__(reason)
        self.error = error


def join(dtype: DType, shape: Shape, tiles: Sequence[ChunkTile], subject: Callable[[], str]) -> LazyTensor:
    """Return the tensor of `dtype` and `shape` that consists of `tiles`, none empty. `subject` names it in errors.

    Raise CorruptError if they leave a hole, overlap, or extend beyond it; UnsupportedError if no sharding gives them.
    """
    if len(tiles) == 1 and tiles[0].tensor.shape == shape and not any(tiles[0].offsets):
        return tiles[0].tensor
    for tile in tiles:
        if any(tile.stop(dim) > extent for dim, extent in enumerate(shape)):
            raise CorruptError(
                f"{subject()} has the shape {list(shape)}, but a chunk of {list(tile.tensor.shape)} at "
                f"{list(tile.offsets)} extends beyond it."
            )
    missing = math.prod(shape) - sum(tile.tensor.numel for tile in tiles)
    if missing > 0:
        raise CorruptError(
            f"{subject()} has {math.prod(shape)} elements, but its chunks have {missing} fewer: chunks are missing.",
            "Copy the files of all ranks. If no files are missing, some elements were not saved.",
        )
    if missing < 0:
        raise CorruptError(
            f"{subject()} has {math.prod(shape)} elements, but its chunks have {-missing} more: they overlap."
        )
    if not tiles:
        return Inline(b"", dtype, shape)
    try:
        return _joined((0,) * len(shape), shape, list(tiles), _CUTS * len(shape))
    except _MisfitError as reason:
        raise reason.error(f"{subject()}: {reason}.") from None


def _joined(start: Shape, stop: Shape, tiles: list[ChunkTile], cuts: int) -> LazyTensor:
    """Return the region from `start` to `stop`, which `tiles` fill, cut at most `cuts` times in depth."""
    if len(tiles) == 1:
        tile = tiles[0]
        if tile.offsets != start or any(tile.stop(dim) != end for dim, end in enumerate(stop)):
            raise _MisfitError(f"no chunk covers a part of the region from {list(start)} to {list(stop)}")
        return tile.tensor
    for dim in range(len(start) if cuts else 0):
        groups = _cut(tiles, dim)
        if len(groups) > 1:
            parts, at = [], start[dim]
            for group in groups:
                end = max(tile.stop(dim) for tile in group)
                if group[0].start(dim) != at:
                    raise _hole(dim, at, start, stop)
                parts.append(_joined(_with(start, dim, at), _with(stop, dim, end), group, cuts - 1))
                at = end
            if at != stop[dim]:
                raise _hole(dim, at, start, stop)
            return Concat(tuple(parts), dim)
    raise _misfit(start, stop, tiles)


def _hole(dim: int, at: int, start: Shape, stop: Shape) -> _MisfitError:
    return _MisfitError(
        f"no chunk covers index {at} of dimension {dim} in the region from {list(start)} to {list(stop)}, and other "
        "chunks there overlap"
    )


def _cut(tiles: list[ChunkTile], dim: int) -> list[list[ChunkTile]]:
    """Group the tiles so that the planes between groups cross no tile."""
    tiles.sort(key=lambda tile: tile.offsets[dim])
    groups: list[list[ChunkTile]] = []
    reach = -1
    for tile in tiles:
        if tile.offsets[dim] >= reach:
            groups.append([])
        groups[-1].append(tile)
        reach = max(reach, tile.stop(dim))
    return groups


def _misfit(start: Shape, stop: Shape, tiles: Sequence[ChunkTile]) -> _MisfitError:
    """Return the reason why the `tiles` of a region cannot be joined: a hole, an overlap, or an unknown way to cut."""
    region = f"the region from {list(start)} to {list(stop)}"
    count = sum(tile.tensor.numel for tile in tiles)
    if count != (room := math.prod(high - low for low, high in zip(start, stop, strict=True))):
        return _MisfitError(f"its {len(tiles)} chunks in {region} have {count} elements, but the region has {room}")
    for tile, later in combinations(tiles[:_COMPARED], 2):
        if all(tile.start(dim) < later.stop(dim) and later.start(dim) < tile.stop(dim) for dim in range(len(start))):
            return _MisfitError(f"in {region}, its chunks at {list(tile.offsets)} and {list(later.offsets)} overlap")
    return _MisfitError(
        f"{region} is split into {len(tiles)} chunks in a way that no sharding produces", UnsupportedError
    )


def _with(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])
