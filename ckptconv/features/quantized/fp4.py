"""The kernels `Largest` and `QuantizeFp4`: codes and scales of MXFP4 and NVFP4, bit for bit as other programs make them
without data.

Sources: compressed-tensors 0.20's `quantization/utils/helpers.py` (`calculate_qparams`, `generate_gparam`),
`mxfp4_utils.py` and `compressors/nvfp4`; NVIDIA Model Optimizer 0.47's `torch/quantization/qtensor/nvfp4_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptconv.features.factors.rounding import numbers_as
from ckptconv.features.quantized.computing import Largest, QuantizeFp4
from ckptconv.features.quantized.quantize import LEAST, MOST_SCALES, e2m1, e4m3, no_codes
from ckptconv.tensors.computing import Box
from ckptconv.tensors.dtypes import SUMMED
from ckptconv.tensors.float_formats import float32_table, numpy_module

if TYPE_CHECKING:
    from ckptconv.features.quantized.dequantize import GivenPart
    from ckptconv.tensors.float_formats import Array

# The largest number of e2m1, and what the largest of a weight becomes: that times the largest of float8_e4m3fn.
_LARGEST, _WHOLE = 6.0, 6.0 * 448.0
# The numbers of a block, by rule, and the dtype of its scale.
_BLOCKS = {"mx": (32, "float8_e8m0fnu"), "over": (16, "float8_e4m3fn"), "times": (16, "float8_e4m3fn")}
# The scale of a block of zeros: compressed-tensors' smallest step of float8_e4m3fn near 1, and Model Optimizer's.
_OF_ZEROS = {"over": 0.125, "times": 1.0}
# The smallest scale that Model Optimizer stores, the smallest number of float8_e4m3fn.
_LEAST_STORED = 2.0**-9
# As bits of float32: what takes a mantissa from 1.75 on to the next power of two; and the exponent of e2m1's largest.
_UP, _EXPONENT = 1 << 21, 2
# Numbers that are looked at together.
_CHUNK = 1 << 16
_FLOATS = SUMMED - {"float64"}


def largest_dtype(kernel: Largest) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    return "float32"


def fp4_dtype(kernel: QuantizeFp4) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    return "uint8" if kernel.made == "codes" else _BLOCKS[kernel.rule][1]


def largest_axes(kernel: Largest, parts: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the axes (`Axis`) of its parts: numbers, or for the scale of a weight largest numbers of rows."""
    return (((0, 1, 1), (1, kernel.columns, 1)),) if kernel.made == "rows" else (((0, 0, 1), (0, 0, 1)),) * parts


def fp4_layout(kernel: QuantizeFp4) -> tuple[tuple[tuple[tuple[int, int, int], ...], ...], tuple[int, ...]]:
    """Return the axes of the kernel's parts, and the tile for which it needs the numbers of every element."""
    side = _BLOCKS[kernel.rule][0]
    numbers = ((0, 1, 1), (1, 2 if kernel.made == "codes" else side, 1))
    axes = (numbers,) if kernel.rule == "mx" else (numbers, ((0, 0, 1),))
    return axes, ((1, side // 2) if kernel.made == "codes" else ())


def fits_largest(kernel: Largest, parts: Sequence[GivenPart], shape: Sequence[int]) -> bool:
    """Return whether `kernel` can compute its result, of `shape`, from these parts."""
    if kernel.made == "rows":
        rows, columns = parts[0].shape if len(parts[0].shape) == 2 else (0, 0)
        is_whole = len(parts) == 1 and kernel.columns > 0 and parts[0].dtype in _FLOATS
        return is_whole and tuple(shape) == (rows, -(-columns // max(kernel.columns, 1)))
    counts = [len(part.shape) == 2 and part.shape[0] * part.shape[1] <= MOST_SCALES for part in parts]
    return (
        kernel.made in ("over", "times")
        and all(counts)
        and tuple(shape) == (1,)
        and {part.dtype for part in parts} == {"float32"}
    )


def fits_fp4(kernel: QuantizeFp4, parts: Sequence[GivenPart], shape: Sequence[int]) -> bool:
    """Return whether `kernel` can compute its result, of `shape`, from these parts."""
    if kernel.made not in ("codes", "scales") or kernel.rule not in _BLOCKS or len(parts[0].shape) != 2:
        return False
    (rows, columns), side = parts[0].shape, _BLOCKS[kernel.rule][0]
    others = [(part.dtype, tuple(part.shape)) for part in parts[1:]]
    return (
        parts[0].dtype in _FLOATS
        and others == ([] if kernel.rule == "mx" else [("float32", (1,))])
        and columns % side == 0
        and tuple(shape) == (rows, columns // (2 if kernel.made == "codes" else side))
    )


def largest(kernel: Largest, boxes: Sequence[Box], arrays: Sequence[Array], out: Array) -> None:
    """Fill `out` with the largest absolute values, or with the scale of a weight that follows from them.

    Raise UnsupportedError for NaN and infinity.
    """
    np = numpy_module()
    if kernel.made == "rows":
        starts = np.arange(0, arrays[0].shape[1], kernel.columns)
        for low in range(0, len(out), _step(arrays[0])):
            sizes = np.abs(numbers_as("f4", boxes[0].dtype, arrays[0][low : low + _step(arrays[0])]))
            out[low : low + len(sizes)] = np.maximum.reduceat(sizes, starts, 1)
        _check(kernel.name, out)
        return
    most = np.float32(max(float(array.view("f4").max(initial=0)) for array in arrays))
    if not most:
        out[...] = 1
    elif kernel.made == "over":
        with np.errstate(over="ignore"):
            out[...] = np.minimum(np.float32(1) / most * np.float32(_WHOLE), np.finfo("f4").max)
    else:
        out[...] = np.maximum(most / np.float32(_WHOLE), np.float32(LEAST))


def quantize_fp4(
    kernel: QuantizeFp4, boxes: Sequence[Box], arrays: Sequence[Array], starts: Sequence[int], out: Array
) -> None:
    """Fill `out` with the tile from index `starts` on, of numbers whose bits are in the first of `arrays`: whole
    blocks. Raise UnsupportedError for NaN and infinity."""
    np = numpy_module()
    box, bits = boxes[0], arrays[0]
    whole = arrays[1].view("f4")[0] if len(arrays) > 1 else np.float32(1)
    # The tile may be a part of the blocks that it needs.
    first = starts[1] - box.starts[1] // 2 if kernel.made == "codes" else 0
    for low in range(0, len(out), _step(bits)):
        with np.errstate(all="ignore"):
            stored = _made(kernel, numbers_as("f4", box.dtype, bits[low : low + _step(bits)]), whole)
        out[low : low + len(stored)] = stored[:, first : first + out.shape[1]]


def _made(kernel: QuantizeFp4, values: Array, whole: Array) -> Array:
    """Return the codes, or the scales, of rows of whole blocks; `whole` is the scale of the weight."""
    np = numpy_module()
    blocks = values.reshape(len(values), -1, _BLOCKS[kernel.rule][0])
    most = np.abs(blocks).max(-1, initial=0)
    _check(kernel.name, most)
    if kernel.rule == "mx":
        exponent = np.maximum((most.view("u4") + np.uint32(_UP) >> 23).astype("i4") - _EXPONENT, 0)
        scales, factor = exponent.astype("u1"), np.ldexp(np.float32(1), exponent - 127)
    else:
        if kernel.rule == "over":
            scales = e4m3(most / np.float32(_LARGEST) * whole)
            is_zero = scales == 0
        else:
            quotient = most / (np.float32(_LARGEST) * whole)
            is_zero = quotient == 0
            scales = e4m3(np.maximum(quotient, np.float32(_LEAST_STORED)))
        numbers = float32_table("float8_e4m3fn").view("f4")
        scales[is_zero] = np.searchsorted(numbers[:127], _OF_ZEROS[kernel.rule])
        factor = numbers[scales] / whole if kernel.rule == "over" else numbers[scales] * whole
    if kernel.made == "scales":
        result: Array = scales
        return result
    quotient = (blocks / factor[..., None]).reshape(values.shape)
    # −0 becomes 0, as it is not less.
    codes = e2m1(np.where(values == 0, np.float32(0), quotient))
    pairs: Array = codes[:, ::2] | codes[:, 1::2] << 4
    return pairs


def _step(numbers: Array) -> int:
    """Return the number of rows of numbers to process together."""
    return max(_CHUNK // max(int(numbers.shape[1]), 1), 1)


def _check(name: str, sizes: Array) -> None:
    if not numpy_module().isfinite(sizes).all():
        raise no_codes(name)
