"""The kernel `Quantize`: codes and scales of numbers, block by block.

The arithmetic is float32: DeepSeek-V3's `inference/kernel.py` for block FP8; OCP Microscaling Formats 1.0 for powers of
two, rounded up so that no number is beyond the largest code.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.factors.rounding import numbers_as
from ckptconv.features.quantized.computing import Quantize, Rescale
from ckptconv.tensors.computing import Box
from ckptconv.tensors.dtypes import SUMMED
from ckptconv.tensors.float_formats import float32_table, numpy_module, scratch

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

# The smallest scale: no subnormal number, which processors may take for 0.
LEAST = 2.0**-126
# The dtypes of codes as they are stored, and of how many elements each holds the codes.
CODES = {"float8_e4m3fn": ("float8_e4m3fn", 1), "int4": ("int32", 8), "e2m1": ("uint8", 2)}
# OCP Microscaling Formats 1.0, table 5.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = frozenset(("float32", "bfloat16", "float8_e8m0fnu"))
# The most numbers of a block, and the most scales of a weight that are looked at together for the largest of them.
LARGEST_BLOCK, MOST_SCALES = 1 << 20, 8 << 20
# Numbers that are quantized at a time.
_CHUNK = 1 << 16
# As bits of float32: the largest float8_e4m3fn and its smallest normal number; what makes float32 round to multiples of
# its smallest number, 2^-9; and half a step of its mantissa of 3 bits, less one.
_LARGEST, _NORMAL, _UNIT, _HALF = 0x43E00000, 0x3C800000, 0x46800000, 0x7FFFF


def made_dtype(kernel: Quantize) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    return CODES[kernel.codes][0] if kernel.made == "codes" else kernel.scale


def layout(kernel: Quantize, dims: int) -> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]]:
    """Return the axes (`Axis`) of the numbers, of `dims` dimensions, of which it makes a tensor, and the tile of
    that of which it needs the numbers of every element."""
    ahead = tuple((dim, 1, 1) for dim in range(dims - 2))
    if kernel.made == "scales":
        return (*ahead, (dims - 2, kernel.rows, 1), (dims - 1, kernel.columns, 1)), ()
    ratio = CODES[kernel.codes][1]
    whole = (*(1,) * (dims - 2), kernel.rows, kernel.columns // ratio)
    return (*ahead, (dims - 2, 1, 1), (dims - 1, ratio, 1)), whole


def fits(kernel: Quantize, dtype: str) -> bool:
    """Return whether `kernel` can compute its result from numbers of `dtype`."""
    return (
        kernel.made in ("codes", "scales")
        and kernel.codes in CODES
        and kernel.scale in _SCALES
        and kernel.rows > 0
        and kernel.columns > 0
        and kernel.rows * kernel.columns <= LARGEST_BLOCK
        and kernel.columns % CODES[kernel.codes][1] == 0
        and all(0 < largest < 512 for largest in kernel.largest)
        and (len(kernel.largest) == 1 or _fits_several(kernel))
        and (kernel.power or kernel.scale != "float8_e8m0fnu")
        and dtype in SUMMED - {"float64"}
    )


def _fits_several(kernel: Quantize) -> bool:
    """Return whether the kernel may choose the best of several scales: for integers, in rows that can be halved."""
    is_known = kernel.codes == "int4" and kernel.rows == 1 and kernel.columns.bit_count() == 1
    return is_known and 0 < len(kernel.largest) < 9


def quantize(
    kernel: Quantize, boxes: Sequence[Box], arrays: Sequence[Array], starts: Sequence[int], out: Array
) -> None:
    """Fill `out` with the tile from index `starts` on, of numbers whose bits are in `arrays`: whole blocks.

    Raise UnsupportedError for NaN and infinity, and if `kernel.exact` for numbers that codes and scales do not give.
    """
    np = numpy_module()
    (box,), (bits,) = boxes, arrays
    ratio = 1 if kernel.made == "scales" else CODES[kernel.codes][1]
    # The tile may be a part of the blocks that it needs.
    first = [start - low for start, low in zip(starts, (*box.starts[:-1], box.starts[-1] // ratio), strict=True)]
    first = [0] * len(first) if kernel.made == "scales" else first
    with np.errstate(all="ignore"):
        for at in _pieces(kernel, bits.shape):
            parts = _made(kernel, np.ascontiguousarray(numbers_as("f4", box.dtype, bits[at])))
            sides = (kernel.rows, kernel.columns) if kernel.made == "scales" else (1, ratio)
            low = [cut.start // side for cut, side in zip(at, (*(1,) * (len(at) - 2), *sides), strict=True)]
            # Where both meet, as seen from the piece, and from the tile.
            both = [
                (max(there, here), min(there + count, here + extent), there, here)
                for there, count, here, extent in zip(low, parts.shape, first, out.shape, strict=True)
            ]
            if all(begin < end for begin, end, _, _ in both):
                of_tile = tuple(slice(begin - here, end - here) for begin, end, _, here in both)
                out[of_tile] = parts[tuple(slice(begin - there, end - there) for begin, end, there, _ in both)]


def _pieces(kernel: Quantize, shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield boxes of whole blocks that cover numbers of `shape`, few enough to stay in the second-level cache."""
    np = numpy_module()
    *lead, rows, columns = shape
    across = min(-(-columns // kernel.columns), max(_CHUNK // (kernel.rows * kernel.columns), 1)) * kernel.columns
    down = max(_CHUNK // (kernel.rows * max(across, 1)), 1) * kernel.rows
    for outer in np.ndindex(*lead):
        for top in range(0, rows, down):
            for left in range(0, columns, across):
                inner = slice(top, min(top + down, rows)), slice(left, min(left + across, columns))
                yield (*(slice(at, at + 1) for at in outer), *inner)


def no_codes(name: str) -> UnsupportedError:
    """Return the error for a weight with values that no code stands for."""
    message = f"{name!r} has NaN or infinity, which have no codes."
    return UnsupportedError(message, f"--keep {shlex.quote(name)} leaves it unquantized.")


def _made(kernel: Quantize, values: Array) -> Array:
    """Return the codes, or the scales, of whole blocks."""
    np = numpy_module()
    most = _most(np.abs(values), kernel.rows, kernel.columns)
    if not np.isfinite(most).all():
        raise no_codes(kernel.name)
    is_one = len(kernel.largest) == 1
    scale = _scales(kernel, most, kernel.largest[0]) if is_one else _best_scales(kernel, values, most)
    if kernel.made == "scales":
        return _stored(kernel.scale, scale)
    factor = scale.repeat(kernel.rows, -2)[..., : values.shape[-2], :] if kernel.rows > 1 else scale
    factor = factor.repeat(kernel.columns, -1)[..., : values.shape[-1]]
    quotient = np.divide(values, factor)
    if kernel.codes == "int4":
        codes = np.clip(np.rint(quotient, out=quotient), -8, 7, out=quotient)
        given = codes * factor if kernel.exact else values
    elif kernel.codes == "e2m1":
        codes = e2m1(quotient)
        given = np.array([*_E2M1, *(-value for value in _E2M1)], "f4")[codes] * factor if kernel.exact else values
    else:
        codes = e4m3(quotient)
        given = float32_table(kernel.codes).view("f4")[codes] * factor if kernel.exact else values
    if kernel.exact and not np.array_equal(given.view("u4"), values.view("u4")):
        raise UnsupportedError(
            f"{kernel.name!r} has numbers that the codes and scales of the format cannot represent exactly.",
            "Use --dequantize --quantize to round them.",
        )
    if kernel.codes == "e2m1":
        pairs: Array = codes[..., ::2] | codes[..., 1::2] << 4
        return pairs
    return _words(codes) if kernel.codes == "int4" else codes


def _most(sizes: Array, rows: int, columns: int) -> Array:
    """Return the largest number of each block; NaN if there is one."""
    np = numpy_module()
    if rows > 1:
        sizes = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[-2], rows), -2)
    if columns > 1 and sizes.shape[-1] % columns == 0:
        sizes = sizes.reshape(*sizes.shape[:-1], -1, columns).max(-1)
    elif columns > 1:
        sizes = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[-1], columns), -1)
    return sizes


def _best_scales(kernel: Quantize, values: Array, most: Array) -> Array:
    """Return for each group of `values`, whose largest are `most`, the scale whose int4 are nearest."""
    np = numpy_module()
    if short := -values.shape[-1] % kernel.columns:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, short)])
    # A column for each group: what is done to all of them is done in long rows.
    groups = np.ascontiguousarray(values.reshape(-1, kernel.columns).T)
    rest, codes = (scratch(name, groups.nbytes).view("f4").reshape(groups.shape) for name in ("rest", "nearest"))
    best = least = None
    for largest in kernel.largest:
        scale = _scales(kernel, most, largest).reshape(-1)
        np.divide(groups, scale, out=rest)
        rest -= np.clip(np.rint(rest, out=codes), -8, 7, out=codes)
        rest *= rest
        squares = rest
        while (half := len(squares) // 2) > 0:
            squares = np.add(squares[:half], squares[half:], out=squares[:half])
        loss = squares[0] * np.square(scale.astype("f8"))
        best = scale if best is None else np.where(loss < least, scale, best)
        least = loss if least is None else np.minimum(loss, least)
    assert best is not None
    result: Array = best.reshape(most.shape)
    return result


def _scales(kernel: Quantize, most: Array, largest: float) -> Array:
    """Return the scale of each block as float32, by which its largest number becomes `largest`."""
    np = numpy_module()
    if kernel.power:
        mantissa, exponent = np.frexp(most)
        over, least = np.frexp(np.float32(largest))
        scales: Array = np.ldexp(np.float32(1), exponent - least + (mantissa > over))
    else:
        scales = most / np.float32(largest)
    scales = np.maximum(scales, np.float32(LEAST))
    if kernel.scale == "bfloat16":
        bits = scales.view("u4")
        scales = ((bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000).view("f4")
    scales[most == 0] = 1
    return scales


def _stored(dtype: str, scale: Array) -> Array:
    """Return scales as they are stored."""
    bits: Array = scale.view("u4")
    if dtype == "float32":
        return scale
    return bits >> (16 if dtype == "bfloat16" else 23)


def e4m3(values: Array) -> Array:
    """Round finite float32 numbers to nearest in float8_e4m3fn; those beyond its largest become that."""
    np = numpy_module()
    bits = values.view("u4")
    size = np.minimum(bits & 0x7FFFFFFF, _LARGEST)
    codes = (size >> 20) & 1
    codes += size
    codes += _HALF
    codes >>= 20
    codes -= (127 - 7) << 3
    small = size < _NORMAL
    if small.any():
        # Their last place is that of a number near 2^14, to which adding rounds them.
        near = size.view("f4")[small] + np.array(_UNIT, "u4").view("f4")
        codes[small] = near.view("u4") - _UNIT
    result: Array = (codes | bits >> 24 & 0x80).astype("u1")
    return result


def e2m1(values: Array) -> Array:
    """Round finite float32 numbers to nearest in e2m1; those beyond its largest become that."""
    np = numpy_module()
    size = np.minimum(np.abs(values), np.float32(_E2M1[-1]))
    exponent = np.clip(np.frexp(size)[1] - 1, 0, 2)
    codes = np.rint(np.ldexp(size, 1 - exponent)).astype("u1") + (2 * exponent).astype("u1")
    result: Array = codes + 8 * np.signbit(values).astype("u1")
    return result


def _words(codes: Array) -> Array:
    """Return integers from −8 to 7, 8 more, eight in a word."""
    np = numpy_module()
    words = (codes + np.float32(8)).astype("u4").reshape(*codes.shape[:-1], -1, 8)
    words <<= np.arange(0, 32, 4, dtype="u4")
    result: Array = np.bitwise_or.reduce(words, -1)
    return result


# --------------------------------------------------------------------------------------------------------------- NVFP4


def rescaled_dtype(kernel: Rescale) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    return "float8_e4m3fn" if kernel.made == "scales" else "float32"


def rescaled_axes(kernel: Rescale) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the axes (`Axis`) of the parts of `kernel`: the codes, the scales of a tile, and all scales."""
    every = ((0, 0, 1), (0, 0, 1))
    return (((0, 1, 1), (1, 8, 1)), ((0, 1, 1), (1, 1, 2)), every) if kernel.made == "scales" else (every,)


def rescale(kernel: Rescale, boxes: Sequence[Box], arrays: Sequence[Array], starts: Sequence[int], out: Array) -> None:
    """Fill `out` with the tile from index `starts` on.

    Raise CorruptError for a scale of NaN, UnsupportedError for one that is too small, and not for zeros alone.
    """
    np = numpy_module()
    most = int(arrays[-1].max(initial=0))
    if most == 255:
        raise CorruptError(f"{kernel.name}: a scale is NaN.", "Download it again.")
    # The largest scale becomes 2^8, the largest power of two of float8_e4m3fn; the other one is finite.
    top = max(most, 8)
    if kernel.made == "global":
        out[...] = np.ldexp(np.float32(1), 135 - top)
        return
    codes, scales, _ = arrays
    columns = np.arange(starts[1], starts[1] + out.shape[1]) // 2 - boxes[1].starts[1]
    exponent = np.take(scales, columns, 1).astype("i2") - top + 8
    small = exponent < -9
    zero = ~(codes & 0x77).reshape(*out.shape, 8).any(-1)
    if (small & ~zero).any():
        raise UnsupportedError(
            f"{kernel.name!r} has scales in a wider range than NVFP4 allows.",
            "Use --dequantize --quantize to round its weights to another format.",
        )
    normal = (exponent + 7) << 3
    powers = np.where(exponent < -6, 1 << np.clip(exponent + 9, 0, 3), normal)
    out[...] = np.where(small, 0, powers)
