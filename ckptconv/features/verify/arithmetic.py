"""Evaluate kernels with arithmetic independent of theirs: casts go through exact float64 numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.tensors.computing import Axis, Bits, Join, Joined
from ckptconv.tensors.dtypes import DTYPES, DType, itemsize_of_components
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import Convert
from ckptconv.tensors.moves import Cast, Conjugate, Negate, Swap
from ckptconv.tensors.registered import ByKernel

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Elements cast at a time: numpy holds several float64 numbers for each.
CAST_BLOCK = 1 << 15


def code_of(dtype: DType) -> str:
    """Return numpy's dtype for an element's bits."""
    return f"u{dtype.itemsize}" if dtype.itemsize <= 8 else f"V{dtype.itemsize}"


def converted(expression: Convert, bits: Array) -> Array:
    """Apply the kernel of `expression` to elements of its tensor."""
    if bits.ndim != 1:
        return converted(expression, bits.reshape(-1)).reshape(bits.shape)
    function = _CONVERTED.get(type(expression.kernel))
    result = function(expression.kernel, expression.tensor.dtype, bits) if function else joined(expression, [bits])
    return result.reshape(-1).view(code_of(expression.dtype))


def _cast_in_blocks(kernel: Cast, dtype: DType, bits: Array) -> Array:
    result: Array = numpy_module().empty(bits.shape, code_of(DTYPES[kernel.target]))
    for at in range(0, len(bits), CAST_BLOCK):
        result[at : at + CAST_BLOCK] = cast(kernel.source, kernel.target, bits[at : at + CAST_BLOCK])
    return result


def _bits(kernel: Bits, dtype: DType, bits: Array) -> Array:
    result: Array = bits // bits.dtype.type(1 << kernel.shift)
    if kernel.width < 8 * kernel.itemsize:
        result %= bits.dtype.type(1 << kernel.width)
    return result.astype(f"u{kernel.result}")


def _rows(dtype: DType, bits: Array, size: int) -> Array:
    """Return a copy of the bytes of elements, `size` in a row."""
    rows: Array = numpy_module().ascontiguousarray(bits).view("u1").reshape(-1, size).copy()
    return rows


def _swapped(kernel: Swap, dtype: DType, bits: Array) -> Array:
    swapped: Array = numpy_module().ascontiguousarray(_rows(dtype, bits, kernel.itemsize)[:, ::-1])
    return swapped


def _conjugated(kernel: Conjugate, dtype: DType, bits: Array) -> Array:
    # The sign is the top bit of the last byte; the imaginary part comes second.
    rows = _rows(dtype, bits, dtype.itemsize)
    rows[:, -1] ^= 0x80 if dtype.kind == "c" else 0
    return rows


def _negated(kernel: Negate, dtype: DType, bits: Array) -> Array:
    if dtype.kind in "iu":
        return 0 - bits
    rows = _rows(dtype, bits, itemsize_of_components(dtype))
    rows[:, -1] ^= 0x80
    if dtype.name.endswith("fnuz"):
        # In these formats, zero (0x00) and NaN (0x80) have no negative.
        rows[(rows & 0x7F) == 0] ^= 0x80
    return rows


# Functions that compute the elements of a `Convert` from those of its tensor, by kernel.
_CONVERTED: dict[type, Callable[[Any, DType, Array], Array]] = {
    Cast: _cast_in_blocks,
    Bits: _bits,
    Swap: _swapped,
    Conjugate: _conjugated,
    Negate: _negated,
}


def joined(expression: Joined | Convert, parts: Sequence[Array]) -> Array:
    """Combine elements of the parts of `expression`. Raise UsageError for a value that does not fit its bits."""
    return _JOINED[type(expression.kernel)](expression.kernel, parts)


def _put_together(kernel: Join, parts: Sequence[Array]) -> Array:
    result: Array = numpy_module().zeros(parts[0].shape, f"u{kernel.result}")
    for part, (_, shift, width) in zip(parts, kernel.kinds, strict=True):
        if part.size and int(part.max()) >= 1 << width:
            raise UsageError(f"The value {int(part.max())} does not fit in {width} bits.")
        result += part.astype(result.dtype) * result.dtype.type(1 << shift)
    return result


# Functions that compute the elements of a `Joined` from those of its parts, by kernel.
_JOINED: ByKernel[Callable[[Any, Sequence[Array]], Array]] = ByKernel(
    "JOINED",
    {
        Join: _put_together,
    },
    within="with_verify",
)


class InputBox(NamedTuple):
    """A box of an input of a tile: bits of elements of `dtype` from index `starts` on, and its dimensions' axes."""

    dtype: str
    bits: Array
    axes: tuple[Axis, ...]
    starts: tuple[int, ...]

    def place(self, indices: Sequence[Array]) -> list[Array]:
        """Return where in `bits` the elements at `indices` are, one array for each of its dimensions; together they
        have the shape of the tile."""
        places = []
        for axis, start in zip(self.axes, self.starts, strict=True):
            shape = [1] * len(indices)
            shape[axis.dim] = -1
            places.append((indices[axis.dim] * axis.num // axis.den - start).reshape(shape))
        return places


# Functions that compute the bits of a tile, by kernel.
TILES: ByKernel[Callable[[Any, Sequence[InputBox], Sequence[Array]], Array]] = ByKernel(
    "TILES",
    {},
    within="with_verify",
)


class Format(NamedTuple):
    """A floating-point format: the bits of its significand (with the implicit one), and the exponents of its smallest
    and largest normal numbers. `maximum` is its largest finite number."""

    digits: int
    least: int
    greatest: int

    @property
    def maximum(self) -> float:
        return math.ldexp(2.0 - math.ldexp(1.0, 1 - self.digits), self.greatest)


# IEEE 754-2019, table 3.5; bfloat16 has float32's exponents and eight digits.
FORMATS = {
    "float64": Format(53, -1022, 1023),
    "float32": Format(24, -126, 127),
    "bfloat16": Format(8, -126, 127),
    "float16": Format(11, -14, 15),
}
# 8-bit formats: bits of exponent, bits of mantissa, and bias. OCP 8-bit Floating Point Specification 1.0, and
# arXiv:2206.02915 for those whose only NaN is minus zero.
_BYTES = {
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2fnuz": (5, 2, 16),
    "float8_e4m3fnuz": (4, 3, 8),
}


def cast(source: str, target: str, bits: Array) -> Array:
    """Cast elements of dtype `source` to dtype `target`: round to nearest, ties to even.

    Overflow gives infinity. A NaN keeps its sign, and the leading bits of its payload that fit. It becomes quiet,
    except from bfloat16 to float32: bfloat16 is the upper half of float32.
    """
    np = numpy_module()
    if source == target:
        return bits
    if target not in FORMATS or source not in (*FORMATS, *_BYTES, "float8_e8m0fnu"):
        raise UnsupportedError(f"A cast from {source} to {target} cannot be verified: no reference is known.")
    with np.errstate(all="ignore"):
        exact = values(source, bits)
        rounded = nearest(exact, FORMATS[target])
        if target == "bfloat16":
            result: Array = (rounded.astype("f4").view("u4") >> 16).astype("u2")
        else:
            result = rounded.astype(target).view(code_of(DTYPES[target]))
    (nans,) = np.nonzero(np.isnan(exact))
    if len(nans):
        result[nans] = _nan(source, target, bits[nans].astype("u8"))
    return result


def values(dtype: str, bits: Array) -> Array:
    """Return the exact value of each element of a floating dtype, as float64."""
    np = numpy_module()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if dtype == "bfloat16":
            array: Array = (bits.astype("u4") << 16).view("f4").astype("f8")
        elif dtype in FORMATS:
            array = bits.view(dtype).astype("f8")
        else:
            array = np.array(table_of(dtype))[bits]
    return array


def value(dtype: DType, bits: bytes) -> float:
    """Return the exact value of one element of a floating dtype."""
    return float(values(dtype.name, numpy_module().frombuffer(bits, code_of(dtype)))[0])


def nearest(exact: Array, format_: Format) -> Array:
    """Round each number to a multiple of the unit in the last place that `format_` has at its magnitude."""
    np = numpy_module()
    _, exponent = np.frexp(exact)  # exact = m · 2^exponent, ½ <= m < 1
    last = np.maximum(exponent - 1, format_.least) - (format_.digits - 1)
    # Scaling by powers of two is exact; rint rounds halves to even.
    rounded = np.ldexp(np.rint(np.ldexp(exact, -last)), last)
    array: Array = np.where(np.abs(rounded) > format_.maximum, np.copysign(np.inf, exact), rounded)
    return array


def _nan(source: str, target: str, bits: Array) -> Array:
    """Return the bits of NaNs of `source` as NaNs of `target`."""
    digits, width = _layout(source)
    new_digits, new_width = _layout(target)
    sign = bits >> (width - 1) if digits else 0 * bits  # float8_e8m0fnu has no sign
    payload = bits & ((1 << digits) - 1)
    payload = payload << (new_digits - digits) if new_digits >= digits else payload >> (digits - new_digits)
    if (source, target) != ("bfloat16", "float32"):
        payload |= 1 << (new_digits - 1)
    infinity = ((1 << (new_width - 1 - new_digits)) - 1) << new_digits
    nans: Array = (sign << (new_width - 1)) | payload | infinity
    return nans


def _layout(dtype: str) -> tuple[int, int]:
    """Return the bits of the mantissa, and of the whole number."""
    mantissa = FORMATS[dtype].digits - 1 if dtype in FORMATS else _BYTES[dtype][1] if dtype in _BYTES else 0
    return mantissa, DTYPES[dtype].itemsize * 8


@functools.cache
def table_of(dtype: str) -> tuple[float, ...]:
    """Return the value of each of the 256 bytes."""
    return tuple(_byte(dtype, bits) for bits in range(256))


def _byte(dtype: str, bits: int) -> float:
    if dtype == "float8_e8m0fnu":
        return math.nan if bits == 255 else math.ldexp(1.0, bits - 127)
    exponent_bits, mantissa_bits, bias = _BYTES[dtype]
    sign = -1.0 if bits >= 128 else 1.0
    exponent, mantissa = divmod(bits & 127, 1 << mantissa_bits)
    top = (1 << exponent_bits) - 1
    if dtype == "float8_e5m2" and exponent == top:
        return sign * math.inf if mantissa == 0 else math.nan
    if (dtype == "float8_e4m3fn" and bits & 127 == 127) or (dtype.endswith("fnuz") and bits == 128):
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
