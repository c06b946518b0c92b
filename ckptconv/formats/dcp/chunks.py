"""Join the chunks of a tensor into one expression, and prove that they cover it exactly. Pure.

Sharding cuts a tensor by planes: into rows (Shard(0)), columns (Shard(1)), tiles, or interleaved blocks. This undoes
it: along a plane that crosses no chunk, the tensor is cut in two, and each part is cut again until it is one chunk. The
proof that nothing is missing or stored twice: each region in the end has exactly the one chunk that fills it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import Concat, Inline, LazyTensor, Narrow

Shape: TypeAlias = tuple[int, ...]

# The work allowed for cutting a tensor: _ROOM, plus _MOST_CUTS for each chunk. A grid takes one cut for each sharded
# dimension; a spiral would take as many as there are chunks.
_MOST_CUTS = 64
_ROOM = 1 << 14


class Tile(NamedTuple):
    """A box of a tensor that begins at `offsets`, and its data."""

    offsets: Shape
    tensor: LazyTensor

    def start(self, dim: int) -> int:
        return self.offsets[dim]

    def stop(self, dim: int) -> int:
        return self.offsets[dim] + self.tensor.shape[dim]


class _MisfitError(Exception):
    """The reason why chunks do not fill a region."""


def join(dtype: DType, shape: Shape, tiles: Sequence[Tile], what: str) -> LazyTensor:
    """Return the tensor of `dtype` and `shape` that `tiles`, none of them empty, make up. `what` names it in errors.

    Raise CorruptError if they leave a hole, overlap, or reach out of it.
    """
    for tile in tiles:
        if any(tile.stop(dim) > extent for dim, extent in enumerate(shape)):
            raise CorruptError(
                f"{what} has the shape {list(shape)}, and a chunk of {list(tile.tensor.shape)} at "
                f"{list(tile.offsets)} reaches beyond it."
            )
    missing = math.prod(shape) - sum(tile.tensor.numel for tile in tiles)
    if missing > 0:
        raise CorruptError(
            f"{what} has {math.prod(shape)} elements, and its chunks lack {missing} of them: they are not all there.",
            "Copy the files of all ranks; a checkpoint that was saved so has lost them.",
        )
    if missing < 0:
        raise CorruptError(f"{what} has {math.prod(shape)} elements, and its chunks {-missing} more: they overlap.")
    if not tiles:
        return Inline(b"", dtype, shape)
    budget = _Budget(_ROOM + _MOST_CUTS * len(tiles), what)
    try:
        return _joined((0,) * len(shape), shape, list(tiles), budget)
    except _MisfitError as reason:
        raise CorruptError(f"{what}: {reason}.") from None


class _Budget:
    """The work that is left for cutting a tensor."""

    def __init__(self, most: int, what: str) -> None:
        self.left, self.what = most, what

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise UnsupportedError(f"{self.what} is cut into chunks in a way that no sharding makes.")


def _joined(start: Shape, stop: Shape, tiles: list[Tile], budget: _Budget) -> LazyTensor:
    """Return the region from `start` to `stop`, in which `tiles` lie."""
    if len(tiles) == 1:
        tile = tiles[0]
        if tile.offsets != start or any(tile.stop(dim) != end for dim, end in enumerate(stop)):
            raise _MisfitError(f"nothing is in a part of the region from {list(start)} to {list(stop)}")
        return tile.tensor
    if not tiles:
        raise _MisfitError(f"nothing is in the region from {list(start)} to {list(stop)}")
    budget.spend(len(tiles))
    for dim in range(len(start)):
        groups = _cut(tiles, dim)
        if len(groups) > 1:
            parts, at = [], start[dim]
            for group in groups:
                end = max(tile.stop(dim) for tile in group)
                if group[0].start(dim) != at:
                    raise _hole(dim, at, start, stop)
                parts.append(_joined(_with(start, dim, at), _with(stop, dim, end), group, budget))
                at = end
            if at != stop[dim]:
                raise _hole(dim, at, start, stop)
            return Concat(tuple(parts), dim)
    return _split(start, stop, tiles, budget)


def _hole(dim: int, at: int, start: Shape, stop: Shape) -> _MisfitError:
    return _MisfitError(
        f"of the region from {list(start)} to {list(stop)}, nothing is at index {at} of dimension {dim}; elsewhere its "
        "chunks overlap"
    )


def _cut(tiles: list[Tile], dim: int) -> list[list[Tile]]:
    """Group the tiles so that the planes between groups cross none."""
    tiles.sort(key=lambda tile: tile.offsets[dim])
    groups: list[list[Tile]] = []
    reach = -1
    for tile in tiles:
        if tile.offsets[dim] >= reach:
            groups.append([])
        groups[-1].append(tile)
        reach = max(reach, tile.stop(dim))
    return groups


def _split(start: Shape, stop: Shape, tiles: list[Tile], budget: _Budget) -> LazyTensor:
    """Cut a region in which every plane crosses a chunk, such as a pinwheel, at the plane that crosses the fewest."""
    planes: dict[tuple[int, int], int] = {}
    for dim in range(len(start)):
        for at in {tile.start(dim) for tile in tiles} - {start[dim]}:
            planes[dim, at] = 0
    budget.spend(len(planes) * len(tiles))
    for dim, at in planes:
        planes[dim, at] = sum(tile.start(dim) < at < tile.stop(dim) for tile in tiles)
    if not planes:
        raise _MisfitError(f"{len(tiles)} chunks are in the same place, at {list(start)}")
    dim, at = min(planes, key=lambda plane: planes[plane])
    before: list[Tile] = []
    after: list[Tile] = []
    for tile in tiles:
        low, high = tile.start(dim), tile.stop(dim)
        if high <= at:
            before.append(tile)
        elif low >= at:
            after.append(tile)
        else:
            before.append(Tile(tile.offsets, Narrow(tile.tensor, dim, 0, at - low)))
            after.append(Tile(_with(tile.offsets, dim, at), Narrow(tile.tensor, dim, at - low, high - at)))
    sides = [
        _joined(start, _with(stop, dim, at), before, budget),
        _joined(_with(start, dim, at), stop, after, budget),
    ]
    return Concat(tuple(sides), dim)


def _with(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])
