"""The kernels that make tiles: of codes and scales, of factors, of weights that are quantized. With numpy.

A tile is a box of a tensor that is computed of several others (`computing.Tiled`). The arithmetic is in `dequantize`,
`quantize` and `low_rank`; here is which of it makes what, and of which tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.tensors import quantize as quantizing
from ckptconv.tensors.casts import steps_of
from ckptconv.tensors.computing import Dequantize, Quantize, Rescale, Tile
from ckptconv.tensors.dequantize import GivenPart, Rounding, dequantize
from ckptconv.tensors.dequantize import fits as fits_codes
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.float_formats import numpy_module, scratch
from ckptconv.tensors.moves import Kernel
from ckptconv.tensors.quantize import made_dtype, quantize, rescale, rescaled_dtype
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


def _dequantized(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    assert isinstance(tile.kernel, Dequantize)
    bits = out.view(f"u{out.itemsize}")
    return dequantize(tile.kernel, tile.boxes, arrays, tile.starts, bits, _rounding(tile.cast or "float32"))


def _quantized(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    assert isinstance(tile.kernel, Quantize)
    quantize(tile.kernel, tile.boxes, arrays, tile.starts, out)
    return 0


def _rescaled(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    assert isinstance(tile.kernel, Rescale)
    rescale(tile.kernel, tile.boxes, arrays, tile.starts, out)
    return 0


@functools.cache
def _rounding(dtype: str) -> Rounding:
    """Return how float32 that was just made, and is still in the cache, becomes `dtype`."""

    def into(values: Array, out: Array) -> int:
        room = scratch("cast too", values.nbytes).view("u4")
        return step(values.reshape(-1).view("u4"), out.reshape(-1), room)

    step = steps_of("float32", dtype)[0] if dtype != "float32" else _copy
    return Rounding(dtype, into)


def _copy(source: Array, result: Array, scratch: Array) -> int:
    result[...] = source
    return 0


def _fits_codes(tensor: Tiled) -> bool:
    given = zip(tensor.parts, tensor.axes, strict=True)
    parts = [GivenPart(part.dtype.name, axes, part.shape) for part, axes in given]
    assert isinstance(tensor.kernel, Dequantize)
    return fits_codes(tensor.kernel, parts, len(tensor.shape))


def _fits_blocks(tensor: Tiled) -> bool:
    kernel, dims = tensor.kernel, len(tensor.shape)
    assert isinstance(kernel, Quantize)
    if len(tensor.parts) != 1 or dims < 2 or not quantizing.fits(kernel, tensor.parts[0].dtype.name):
        return False
    axes, whole = quantizing.layout(kernel, dims)
    return tuple(map(tuple, tensor.axes[0])) == axes and tensor.whole == whole


def _fits_powers(tensor: Tiled) -> bool:
    kernel, parts = tensor.kernel, tensor.parts
    assert isinstance(kernel, Rescale)
    if kernel.made not in ("scales", "global") or tensor.axes != quantizing.rescaled_axes(kernel) or tensor.whole:
        return False
    *codes, every = parts
    if every.numel > quantizing.MOST_SCALES:
        return False
    if kernel.made == "global":
        return tensor.shape == (1,) and every.dtype.name == "float8_e8m0fnu"
    rows, groups = every.shape
    alike = codes[1].shape == (rows, groups) and codes[0].shape == (rows, 16 * groups) and len(tensor.shape) == 2
    return alike and [part.dtype.name for part in parts] == ["uint8", "float8_e8m0fnu", "float8_e8m0fnu"]


# What makes the tiles of a `Tiled`.
TILING = ByKernel(
    "TILING",
    {
        Dequantize: TileMaker("dequantize", "float32", _dequantized, _fits_codes),
        Quantize: TileMaker("quantize", made_dtype, _quantized, _fits_blocks),
        Rescale: TileMaker("rescale", rescaled_dtype, _rescaled, _fits_powers),
    },
)


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
