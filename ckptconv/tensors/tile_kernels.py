"""Kernels of tiles: from codes and scales, from factors, from weights that are quantized. With numpy.

A tile is a box of a tensor that is computed from several others (`computing.Tiled`). All these kernels are those of
features, which say what a kernel computes, and from which tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.tensors.computing import Tile
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.moves import Kernel
from ckptconv.tensors.registered import ByKernel

if TYPE_CHECKING:
    from ckptconv.tensors.computing import Tiled
    from ckptconv.tensors.float_formats import Array


class TileMaker(NamedTuple):
    """A kernel of tiles: its name in JSON, the dtype of its elements, or a function that returns it, the function that
    fills an array of them, and a predicate of the tensors that it computes.

    `fill` takes the tile, the bits of its inputs (unsigned integers in the shapes of the boxes), and the array. It
    returns how many finite values became infinite in a cast.
    """

    name: str
    dtype: str | Callable[[Any], str]
    fill: Callable[[Tile, Sequence[Array], Array], int]
    fits: Callable[[Tiled], bool]


# Kernels that compute the tiles of a `Tiled`.
TILING: ByKernel[TileMaker] = ByKernel("TILING", {})


def tile_dtype(kernel: Kernel) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    dtype = TILING[type(kernel)].dtype
    return dtype if isinstance(dtype, str) else dtype(kernel)


def fill(tile: Tile, data: memoryview, out: memoryview) -> int:
    """Compute a tile from its inputs in `data`. Return how many finite values became infinite."""
    np = numpy_module()
    arrays = []
    for box in tile.boxes:
        item = DTYPES[box.dtype].itemsize
        count = math.prod(box.counts)
        if box.offset + count * item > len(data):
            raise ValueError(f"{tile} leaves its {len(data)} bytes")
        arrays.append(np.frombuffer(data, f"u{item}", count, box.offset).reshape(box.counts))
    maker = TILING[type(tile.kernel)]
    dtype = DTYPES[tile.cast or tile_dtype(tile.kernel)]
    code = f"f{dtype.itemsize}" if dtype.name in ("float64", "float32", "float16") else f"u{dtype.itemsize}"
    return maker.fill(tile, arrays, np.frombuffer(out, code).reshape(tile.counts))
