"""What makes tiles: of codes and scales, of factors, of weights that are quantized. With numpy.

A tile is a box of a tensor that is computed of several others (`computing.Tiled`). Which kernel makes what, and of
which tensors, is said where the kernel is: all are those of features.
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
    """How a kernel makes a tile: its name in JSON, the dtype of its elements, or what tells it, the function that fills
    an array of them, and whether a tensor is one that it makes.

    `fill` takes the tile, the bits of its inputs (unsigned integers in the shapes of the boxes), and the array. It
    returns how many finite values became infinite in a cast.
    """

    name: str
    dtype: str | Callable[[Any], str]
    fill: Callable[[Tile, Sequence[Array], Array], int]
    fits: Callable[[Tiled], bool]


# What makes the tiles of a `Tiled`.
TILING: ByKernel[TileMaker] = ByKernel("TILING", {})


def tile_dtype(kernel: Kernel) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    dtype = TILING[type(kernel)].dtype
    return dtype if isinstance(dtype, str) else dtype(kernel)


def fill(tile: Tile, data: memoryview, out: memoryview) -> int:
    """Make a tile of its inputs in `data`. Return how many finite values became infinite."""
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
