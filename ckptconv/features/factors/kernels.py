"""The kernels `LowRank` and `Magnitude`: their tiles, and the tensors that they take.

The arithmetic is in `low_rank`; the independent arithmetic of verification is in `with_verify`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.features.factors.low_rank import DEEP, added, lengthened, rounded
from ckptconv.tensors.casts import cast as cast_into
from ckptconv.tensors.computing import MOST_NEEDED, Axis, Tile, Tiled, Tiling
from ckptconv.tensors.dtypes import DTYPES, SUMMED
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.tile_kernels import TileMaker

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

# The largest inner dimension of factors, and the longest rows with new lengths: far more than adapters have.
MOST_RANK, MOST_COLUMNS = 1 << 17, 1 << 20


def _sides(tensor: Tiled, most: int) -> tuple[int, ...]:
    """Return the sides of tiles of at most `most` elements, if the factors are too long for whole rows; else ()."""
    (left, right), rank = tensor.parts[1:3], tensor.parts[1].shape[1]
    room = MOST_NEEDED // (4 if rank > DEEP else 2) // max(rank, 1)
    across = {tensor.axes[1][0].dim: left, tensor.axes[2][1].dim: right}
    height, width = (min(max(room // across[dim].dtype.itemsize, 1), tensor.shape[dim]) for dim in (0, 1))
    if rank <= DEEP and width == tensor.shape[1]:
        return ()
    width = max(min(width, most), 1)
    return max(min(height, most // width), 1), width


_PRODUCTS = Tiling(cast_from=lambda tensor: tensor.parts[0].dtype.itemsize, sides=_sides)


class LowRank(NamedTuple):
    """Add a product of two matrices, times `scale`, in float64. The parts are the base and the two factors.

    The first factor has the inner dimension last, the second has it first. Products are added in its order. A fourth
    part has a number for each column of the second factor, by which that is multiplied first.
    """

    scale: float

    @property
    def tiling(self) -> Tiling:
        """The way to cut and cast tiles."""
        return _PRODUCTS


def with_product(
    base: LazyTensor,
    left: LazyTensor,
    right: LazyTensor,
    *times: LazyTensor,
    scale: float = 1.0,
    turned: bool = False,
) -> Tiled:
    """Return `base` plus the product of two factors times `scale`, transposed if `turned`, as float64. `times` is the
    fourth part of a `LowRank`."""
    rows, columns = (1, 0) if turned else (0, 1)
    axes = (Axis(0), Axis(1)), (Axis(rows), Axis(0, 0)), (Axis(0, 0), Axis(columns)), (Axis(columns),)
    parts = (base, left, right, *times)
    return Tiled(parts, axes[: len(parts)], LowRank(scale), DTYPES["float64"], base.shape, (0, 0))


class Magnitude(NamedTuple):
    """Give the rows of a matrix of float64 new lengths. The parts are whole rows, and the lengths.

    A row is multiplied by its new length over its present one, the root of the sum of squares, which are added in
    order.
    """


def _low_rank(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    assert isinstance(tile.kernel, LowRank)
    if not tile.cast:
        added(tile.kernel.scale, tile.boxes, arrays, out)
        return 0
    cast = functools.partial(_cast_array, Cast("float64", tile.cast))
    return rounded(tile.kernel.scale, tile.boxes, arrays, tile.cast, out.view(f"u{out.itemsize}"), cast)


def _cast_array(cast: Cast, values: Array) -> tuple[Array, int]:
    """Return the bits of an array after a cast, and the number of finite values that became infinite."""
    np = numpy_module()
    bits = np.empty(values.shape, f"u{DTYPES[cast.target].itemsize}")
    plain = np.ascontiguousarray(values).reshape(-1).view("u1").data
    return bits, cast_into(cast, plain, bits.reshape(-1).view("u1").data)


def _magnitude(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    lengthened(tile.boxes, arrays, tile.starts, out)
    return 0


def _fits_factors(tensor: Tiled) -> bool:
    if len(tensor.shape) != 2 or len(tensor.parts) not in (3, 4) or not _are_numbers(tensor):
        return False
    left, right = tensor.parts[1:3]
    along = [[(axis.dim, axis.num, axis.den) for axis in axes] for axes in tensor.axes]
    if [len(axes) for axes in along[:3]] != [2, 2, 2] or any(axes != along[2][1:] for axes in along[3:]):
        return False
    dims = along[1][0][0], along[2][1][0]
    inner = left.shape[1] == right.shape[0] <= MOST_RANK and along[1][1][1] == along[2][0][1] == 0
    return (
        inner
        and along[0] == [(0, 1, 1), (1, 1, 1)]
        and {along[1][0], along[2][1]} == {(dim, 1, 1) for dim in (0, 1)}
        and (dims in ((0, 1), (1, 0)))
    )


def _fits_rows(tensor: Tiled) -> bool:
    if len(tensor.shape) != 2 or len(tensor.parts) != 2 or not _are_numbers(tensor):
        return False
    along = [[(axis.dim, axis.num) for axis in axes] for axes in tensor.axes]
    ones = all(axis.den == 1 for axes in tensor.axes for axis in axes)
    stop = tensor.starts[1] + tensor.shape[1]
    return ones and along == [[(0, 1), (1, 0)], [(0, 1)]] and stop <= tensor.parts[0].shape[1] <= MOST_COLUMNS


def _are_numbers(tensor: Tiled) -> bool:
    return not tensor.whole and all(part.dtype.name in SUMMED for part in tensor.parts)


TILING: dict[type[Any], TileMaker] = {
    LowRank: TileMaker("low rank", "float64", _low_rank, _fits_factors),
    Magnitude: TileMaker("magnitude", "float64", _magnitude, _fits_rows),
}
