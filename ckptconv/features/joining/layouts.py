"""The part of a tensor that each rank of a device mesh holds. Pure.

Source: torch/distributed/tensor/{placement_types,_utils,_dtensor_spec}.py of torch 2.1 to 2.13. A tensor is cut as
torch.chunk cuts it, once for each mesh dimension that shards it, in the order of the mesh dimensions or in the order
that the spec states. `_StridedShard(dim, split_factor)` first cuts into `split_factor` pieces, and then cuts each of
them for the ranks. The result is the same as if the mesh dimensions to its right had cut first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, TypeAlias

from ckptconv.features.joining.chunks import Shape

# Ranges of the indices of a dimension, [start, stop), in the order in which a rank stores them.
Spans: TypeAlias = tuple[tuple[int, int], ...]


class Mesh(NamedTuple):
    """A grid of ranks: all `ranks` in C order, the grid's `shape`, and the `names` of its dimensions, if it has any."""

    ranks: tuple[int, ...]
    shape: Shape
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = self.names or ("",) * len(self.shape)
        return " × ".join(f"{name} {size}".strip() for name, size in zip(names, self.shape, strict=True))

    def coordinate(self, rank: int) -> Shape:
        """Return the indices of `rank`, which is in the mesh, in the grid."""
        return unravelled(self.ranks.index(rank), self.shape)


class MeshCut(NamedTuple):
    """The cut of a tensor by a mesh dimension: along `dim`, into `factor` times as many pieces as it has ranks."""

    dim: int
    factor: int = 1


class Distribution(NamedTuple):
    """The distribution of a tensor of `shape` over `mesh`: one placement for each mesh dimension, None for a replica.

    `order` lists mesh dimensions in the order in which they cut the tensor; () for their own order.
    """

    mesh: Mesh
    placements: tuple[MeshCut | None, ...]
    shape: Shape
    order: tuple[int, ...] = ()


def unravelled(position: int, shape: Shape) -> Shape:
    """Return the indices of the element at `position`, in C order, of a grid of `shape`."""
    indices = []
    for extent in reversed(shape):
        position, index = divmod(position, extent)
        indices.append(index)
    return tuple(reversed(indices))


def by_shards(layout: Distribution) -> Distribution | None:
    """Return the layout with the same cuts without strides, in another order; None if there is none.

    FSDP over tensor parallelism cuts so. If the extent is not divisible, the two layouts differ.
    """
    orders: dict[int, list[int]] = {}
    for at in reversed(range(len(layout.placements))):
        cut = layout.placements[at]
        if cut is None:
            continue
        order = orders.setdefault(cut.dim, [])
        factors = [math.prod(layout.mesh.shape[dim] for dim in order[:count]) for count in range(len(order) + 1)]
        if cut.factor not in factors:
            return None
        order.insert(factors.index(cut.factor), at)
    plain = tuple(cut and MeshCut(cut.dim) for cut in layout.placements)
    return layout._replace(placements=plain, order=tuple(at for order in orders.values() for at in order))


@functools.lru_cache(maxsize=1 << 14)
def spans(layout: Distribution, coordinate: Shape) -> tuple[Spans, ...]:
    """Return, for each dimension of the tensor, the indices that the rank at `coordinate` holds."""
    indices: list[Spans] = [((0, extent),) for extent in layout.shape]
    for at in layout.order or range(len(layout.placements)):
        cut = layout.placements[at]
        if cut is not None:
            indices[cut.dim] = _cut(indices[cut.dim], cut.factor, layout.mesh.shape[at], coordinate[at])
    return tuple(indices)


def _cut(whole: Spans, factor: int, ranks: int, rank: int) -> Spans:
    """Return the indices that `rank` of `ranks` holds of `whole`, which is cut into `factor` pieces first."""
    pieces: list[tuple[int, int]] = []
    for piece in range(factor):
        for start, stop in _chunk(_chunk(whole, factor, piece), ranks, rank):
            if pieces and pieces[-1][1] == start:
                pieces[-1] = pieces[-1][0], stop
            else:
                pieces.append((start, stop))
    return tuple(pieces)


def _chunk(whole: Spans, count: int, number: int) -> Spans:
    """Return piece `number` of the `count` pieces into which torch.chunk cuts. The last piece is smaller or empty."""
    if count == 1:
        return whole
    total = sum(stop - start for start, stop in whole)
    size = -(-total // count)
    low, high = number * size, (number + 1) * size
    pieces = []
    at = 0
    for start, stop in whole:
        first, last = max(start, start + low - at), min(stop, start + high - at)
        if first < last:
            pieces.append((first, last))
        at += stop - start
    return tuple(pieces)


def extents(indices: tuple[Spans, ...]) -> Shape:
    """Return the shape of the part of a tensor with these `indices`."""
    return tuple(sum(stop - start for start, stop in dim_spans) for dim_spans in indices)


class HeldBox(NamedTuple):
    """A box of a tensor: its offsets in the tensor, its offsets in the rank's part, and its extents."""

    offsets: Shape
    inside: Shape
    sizes: Shape


def boxes(indices: tuple[Spans, ...]) -> Iterator[HeldBox]:
    """Yield the boxes that make up a rank's `indices`: one, unless its part is interleaved with others'."""
    placed = []
    for dim_spans in indices:
        at, runs = 0, []
        for start, stop in dim_spans:
            runs.append((start, at, stop - start))
            at += stop - start
        placed.append(runs)
    for corner in product(*placed):
        offsets, inside, sizes = zip(*corner, strict=True) if corner else ((), (), ())
        yield HeldBox(offsets, inside, sizes)
