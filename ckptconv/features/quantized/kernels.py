"""The kernels of quantized weights: their input tensors, and the tiles that they compute.

The arithmetic is in `dequantize` and `quantize`; what it is compared with is in `arithmetic`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.features.quantized.computing import Dequantize, Largest, Quantize, QuantizeFp4, Rescale
from ckptconv.features.quantized.dequantize import GivenPart, Rounding, dequantize
from ckptconv.features.quantized.dequantize import fits as fits_codes
from ckptconv.features.quantized.fp4 import (
    fits_fp4,
    fits_largest,
    fp4_dtype,
    fp4_layout,
    largest,
    largest_axes,
    largest_dtype,
    quantize_fp4,
)
from ckptconv.features.quantized.quantize import (
    MOST_SCALES,
    layout,
    made_dtype,
    quantize,
    rescale,
    rescaled_axes,
    rescaled_dtype,
)
from ckptconv.features.quantized.quantize import fits as fits_blocks
from ckptconv.tensors.casts import steps_of
from ckptconv.tensors.computing import Tile
from ckptconv.tensors.float_formats import scratch
from ckptconv.tensors.tile_kernels import TileMaker

if TYPE_CHECKING:
    from ckptconv.tensors.computing import Tiled
    from ckptconv.tensors.float_formats import Array


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


def _largest(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    assert isinstance(tile.kernel, Largest)
    largest(tile.kernel, tile.boxes, arrays, out)
    return 0


def _quantized_fp4(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    assert isinstance(tile.kernel, QuantizeFp4)
    quantize_fp4(tile.kernel, tile.boxes, arrays, tile.starts, out)
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


def _given(tensor: Tiled) -> list[GivenPart]:
    given = zip(tensor.parts, tensor.axes, strict=True)
    return [GivenPart(part.dtype.name, axes, part.shape) for part, axes in given]


def _fits_codes(tensor: Tiled) -> bool:
    assert isinstance(tensor.kernel, Dequantize)
    return fits_codes(tensor.kernel, _given(tensor), len(tensor.shape))


def _fits_largest(tensor: Tiled) -> bool:
    kernel = tensor.kernel
    assert isinstance(kernel, Largest)
    is_known = bool(tensor.parts) and fits_largest(kernel, _given(tensor), tensor.shape)
    return is_known and _axes_of(tensor) == largest_axes(kernel, len(tensor.parts)) and not tensor.whole


def _fits_fp4(tensor: Tiled) -> bool:
    kernel = tensor.kernel
    assert isinstance(kernel, QuantizeFp4)
    is_known = bool(tensor.parts) and fits_fp4(kernel, _given(tensor), tensor.shape)
    return is_known and (_axes_of(tensor), tensor.whole) == fp4_layout(kernel)


def _axes_of(tensor: Tiled) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    return tuple(tuple((axis.dim, axis.num, axis.den) for axis in axes) for axes in tensor.axes)


def _fits_blocks(tensor: Tiled) -> bool:
    kernel, dims = tensor.kernel, len(tensor.shape)
    assert isinstance(kernel, Quantize)
    if len(tensor.parts) != 1 or dims < 2 or not fits_blocks(kernel, tensor.parts[0].dtype.name):
        return False
    axes, whole = layout(kernel, dims)
    return tuple(map(tuple, tensor.axes[0])) == axes and tensor.whole == whole


def _fits_powers(tensor: Tiled) -> bool:
    kernel, parts = tensor.kernel, tensor.parts
    assert isinstance(kernel, Rescale)
    if kernel.made not in ("scales", "global") or tensor.axes != rescaled_axes(kernel) or tensor.whole:
        return False
    *codes, every = parts
    if every.numel > MOST_SCALES:
        return False
    if kernel.made == "global":
        return tensor.shape == (1,) and every.dtype.name == "float8_e8m0fnu"
    rows, groups = every.shape
    alike = codes[1].shape == (rows, groups) and codes[0].shape == (rows, 16 * groups) and len(tensor.shape) == 2
    return alike and [part.dtype.name for part in parts] == ["uint8", "float8_e8m0fnu", "float8_e8m0fnu"]


TILING: dict[type[Any], TileMaker] = {
    Dequantize: TileMaker("dequantize", "float32", _dequantized, _fits_codes),
    Quantize: TileMaker("quantize", made_dtype, _quantized, _fits_blocks),
    Rescale: TileMaker("rescale", rescaled_dtype, _rescaled, _fits_powers),
    Largest: TileMaker("largest", largest_dtype, _largest, _fits_largest),
    QuantizeFp4: TileMaker("quantize fp4", fp4_dtype, _quantized_fp4, _fits_fp4),
}
