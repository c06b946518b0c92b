"""What kernels make of bits, by arithmetic of their own: casts go through exact float64 numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.tensors.computing import (
    Axis,
    Bits,
    Dequantize,
    Join,
    Joined,
    Quantize,
    Rescale,
    WeightedSum,
)
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
    made = _CONVERTED[type(expression.kernel)](expression.kernel, expression.tensor.dtype, bits)
    return made.reshape(-1).view(code_of(expression.dtype))


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


# What makes the elements of a `Convert` of those of its tensor, by kernel.
_CONVERTED: dict[type, Callable[[Any, DType, Array], Array]] = {
    Cast: _cast_in_blocks,
    Bits: _bits,
    Swap: _swapped,
    Conjugate: _conjugated,
    Negate: _negated,
}


def joined(expression: Joined, parts: Sequence[Array]) -> Array:
    """Combine elements of the parts of `expression`. Raise UsageError for a value that does not fit its bits."""
    return _JOINED[type(expression.kernel)](expression.kernel, parts)


def _put_together(kernel: Join, parts: Sequence[Array]) -> Array:
    result: Array = numpy_module().zeros(parts[0].shape, f"u{kernel.result}")
    for part, (_, shift, width) in zip(parts, kernel.kinds, strict=True):
        if part.size and int(part.max()) >= 1 << width:
            raise UsageError(f"A value is {int(part.max())}, and is to be stored in {width} bits.")
        result += part.astype(result.dtype) * result.dtype.type(1 << shift)
    return result


def _summed(kernel: WeightedSum, parts: Sequence[Array]) -> Array:
    """Return the bits of weighted sums: in float64, each product and each sum rounded, in the order of the parts."""
    np = numpy_module()
    result: Array = np.empty(parts[0].shape, "u8")
    flat = [part.reshape(-1) for part in parts]
    with np.errstate(all="ignore"):
        for at in range(0, result.size, CAST_BLOCK):
            total: Any = None
            for dtype, weight, part in zip(kernel.dtypes, kernel.weights, flat, strict=True):
                term = weight * values(dtype, part[at : at + CAST_BLOCK])
                total = term if total is None else total + term
            total = total / kernel.over
            result.reshape(-1)[at : at + CAST_BLOCK] = np.where(np.isnan(total), np.nan, total).view("u8")
    return result


# What makes the elements of a `Joined` of those of its parts, by kernel.
_JOINED: ByKernel[Callable[[Any, Sequence[Array]], Array]] = ByKernel(
    "JOINED",
    {
        Join: _put_together,
        WeightedSum: _summed,
    },
    evaluating=True,
)


class Given(NamedTuple):
    """A box of an input of a tile: bits of elements of `dtype` from index `starts` on, and what its dimensions are."""

    dtype: str
    bits: Array
    axes: tuple[Axis, ...]
    starts: tuple[int, ...]

    def place(self, indices: Sequence[Array]) -> list[Array]:
        """Return where in `bits` the elements at `indices` are, one array for each of its dimensions; together they
        have the shape of the tile."""
        found = []
        for axis, start in zip(self.axes, self.starts, strict=True):
            shape = [1] * len(indices)
            shape[axis.dim] = -1
            found.append((indices[axis.dim] * axis.num // axis.den - start).reshape(shape))
        return found


# The bits of a code, and those of the word that it lies in; the value of each code of four bits (OCP Microscaling
# Formats 1.0, table 5); and the place in a word that AutoAWQ gives to each of eight.
_PACKED = {"e2m1": (4, 8), "table4": (4, 8), "awq": (4, 32), **{f"int{bits}": (bits, 32) for bits in range(2, 9)}}
_E2M1 = [sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def _dequantized(kernel: Dequantize, parts: Sequence[Given], indices: Sequence[Array]) -> Array:
    """Return the bits of the weights at `indices`: each product in float64, rounded as the kernel says."""
    np = numpy_module()
    given = dict(zip(("codes", *kernel.roles), parts, strict=True))
    table = values("float32", given["table"].bits) if "table" in given else None
    group = given["index"].bits.astype("i4")[given["index"].place(indices)[0]] if "index" in given else None
    with np.errstate(all="ignore"):
        codes = _codes(kernel.codes, given["codes"], indices, table)
        less = codes - kernel.offset
        if "zero" in given:
            stored = "own" if given["zero"].dtype == "int8" else kernel.codes
            less = less - _codes(stored, given["zero"], indices, None, group)
        scale = given["scale"]
        factor = values(scale.dtype, _looked_up(scale, indices, group))
        if not np.isfinite(factor).all():
            raise CorruptError(f"{kernel.scales}: a scale is NaN or infinite.")
        exact = less / factor if kernel.over else less * factor
        made = _nearest(exact, _FORMATS["float32"])
        if "shift" in given:
            made = _nearest(made + values("float32", given["shift"].bits)[0], _FORMATS["float32"])
        made = _nearest(made, _FORMATS[kernel.between])
        lost = (factor == 0) & (less != 0) & ("shift" not in given)
        if (lost | (np.isinf(made) & np.isfinite(codes))).any():
            raise CorruptError(f"{kernel.scales}: a scale is 0 where the code is not, or too large.")
        single = np.where(np.isnan(made), np.nan, made).astype("f4").view("u4")
        result: Array = np.broadcast_to(single, [len(each) for each in indices])
    return result


def _looked_up(given: Given, indices: Sequence[Array], group: Array | None) -> Array:
    """Return the elements of an input for those of a tile, those of a dimension that is whole by `group`."""
    place = given.place(indices)
    for dim, axis in enumerate(given.axes):
        if not axis.num and group is not None:
            if group.size and not 0 <= group.min() <= group.max() < given.bits.shape[dim]:
                raise CorruptError(f"A column is of group {group.max()}, and there are {given.bits.shape[dim]}.")
            place[dim] = group
    found: Array = given.bits[tuple(place)]
    return found


def _codes(
    codes: str, given: Given, indices: Sequence[Array], table: Array | None, group: Array | None = None
) -> Array:
    """Return the codes of the elements at `indices` as float64 numbers."""
    np = numpy_module()
    if codes not in _PACKED:
        bits = _looked_up(given, indices, group)
        plain: Array = _plain(given.dtype, bits) if table is None else table[bits]
        return plain
    width, word = _PACKED[codes]
    (dim,) = (dim for dim, axis in enumerate(given.axes) if (axis.num, axis.den) == (width, word))
    at = indices[given.axes[dim].dim]
    first = at * width
    if word % width == 0:
        number = at // (word // width)
        first = number * word + _within(codes, at % (word // width), word // width) * width
    shape = [1] * len(indices)
    shape[given.axes[dim].dim] = -1
    found: Array = np.zeros((), "i8")
    # A code may begin in one word and end in the next: then it is taken bit by bit.
    taken = width if word % width == 0 else 1
    for bit in range(0, width, taken):
        place = given.place(indices) if group is None else _placed(given, indices, group)
        place[dim] = ((first + bit) // word - given.starts[dim]).reshape(shape)
        words = given.bits[tuple(place)].astype("i8")
        found = found + (words // (1 << ((first + bit) % word).reshape(shape)) % (1 << taken) << bit)
    made: Array = found.astype("f8")
    if table is not None:
        made = table[found]
    elif codes == "e2m1":
        made = np.array(_E2M1)[found]
    return made


def _placed(given: Given, indices: Sequence[Array], group: Array) -> list[Array]:
    place = given.place(indices)
    return [group if not axis.num else at for axis, at in zip(given.axes, place, strict=True)]


def _within(codes: str, number: Array, count: int) -> Array:
    """Return which of the `count` places in a word, from the lowest bits on, the codes of these numbers have."""
    places: Array = numpy_module().array(_AWQ)[number] if codes == "awq" else number
    return count - 1 - places if codes == "table4" else places


def _plain(dtype: str, bits: Array) -> Array:
    """Return numbers of an 8-bit dtype as float64."""
    return bits.view(f"{DTYPES[dtype].kind}1").astype("f8") if dtype in ("uint8", "int8") else values(dtype, bits)


def _quantized(kernel: Quantize, parts: Sequence[Given], indices: Sequence[Array]) -> Array:
    """Return the bits of codes or scales at `indices`: the exact value of each step in float64, rounded as it is
    stored."""
    np = numpy_module()
    (given,) = parts
    *ahead, rows, columns = indices
    of_scales = kernel.made == "scales"
    packed = 1 if of_scales else {"int4": 8, "e2m1": 2}.get(kernel.codes, 1)
    sides = kernel.rows, kernel.columns
    # The blocks, and from there on the numbers that are needed of each dimension.
    blocks = [each // (1 if of_scales else side) for each, side in zip((rows, columns * packed), sides, strict=True)]
    bounds = [(each[0] * side, (each[-1] + 1) * side) for each, side in zip(blocks, sides, strict=True)]
    cuts = [slice(low - start, high - start) for (low, high), start in zip(bounds, given.starts[-2:], strict=True)]
    experts = np.ix_(*(each - start for each, start in zip(ahead, given.starts, strict=False))) if ahead else ...
    within: Any = given.bits[experts]
    numbers = values(given.dtype, within[(..., *cuts)])
    if not np.isfinite(numbers).all():
        raise UnsupportedError(f"{kernel.name!r} has NaN or infinity.")
    # Zeros fill the blocks at the edges.
    filled = np.zeros((*numbers.shape[:-2], *(high - low for low, high in bounds)))
    filled[(..., *(slice(extent) for extent in numbers.shape[-2:]))] = numbers
    few = filled.reshape(*filled.shape[:-2], filled.shape[-2] // sides[0], sides[0], -1, sides[1])
    scales = [_scale_of(kernel, np.abs(few).max((-3, -1)), largest) for largest in kernel.largest]
    scale = scales[0]
    if len(scales) > 1:
        losses = np.stack([_loss_of(few[..., 0, :, :], each) for each in scales])
        scale = np.take_along_axis(np.stack(scales), losses.argmin(0)[None], 0)[0]
    if of_scales:
        made: Array = _scale_bits(kernel.scale, scale)
        return made
    quotient = _nearest(few / scale[..., :, None, :, None], _FORMATS["float32"]).reshape(filled.shape)
    if kernel.codes == "int4":
        codes = np.clip(np.rint(quotient), -8, 7)
        exact = codes
        wide = (codes + 8).astype("u4").reshape(*codes.shape[:-1], -1, 8)
        stored = sum(wide[..., at] * np.uint32(16**at) for at in range(8))
    elif kernel.codes == "e2m1":
        exact = _nearest(np.clip(quotient, -6, 6), _Format(2, 0, 2))
        nibbles = (np.searchsorted(_E2M1[:8], np.abs(exact)) + 8 * np.signbit(quotient)).astype("u1")
        stored = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    else:
        exact = _nearest(np.clip(quotient, -448, 448), _Format(4, -6, 8))
        fraction, exponent = np.frexp(np.abs(exact))
        place = np.where(np.abs(exact) < 2.0**-6, np.abs(exact) * 512, exponent * 8 + 40 + fraction * 16)
        stored = (place + 128 * np.signbit(quotient)).astype("u1")
    if kernel.exact:
        again = exact.reshape(few.shape) * scale[..., :, None, :, None]
        if (again != few).any():
            raise UnsupportedError(f"{kernel.name!r} has numbers that codes and scales do not give exactly.")
    at = rows - bounds[0][0], columns - bounds[1][0] // packed
    taken: Array = stored[..., at[0][:, None], at[1]]
    return taken


def _loss_of(groups: Array, scale: Array) -> Array:
    """Return the squares of what codes from −8 to 7 are off by in each of `groups`, added by halves in float32, times
    that of the scale."""
    np = numpy_module()
    single = _FORMATS["float32"]
    quotient = _nearest(groups / scale[..., None], single)
    terms = _nearest((quotient - np.clip(np.rint(quotient), -8, 7)) ** 2, single)
    for _ in range(groups.shape[-1].bit_length() - 1):
        terms = _nearest(terms.reshape(*terms.shape[:-1], 2, -1).sum(-2), single)
    loss: Array = terms[..., 0] * scale**2
    return loss


def _scale_of(kernel: Quantize, most: Array, largest: float) -> Array:
    """Return the scales of blocks, of which the largest absolute values are `most`, and become `largest`."""
    np = numpy_module()
    least = 2.0**-126
    exact = most / largest
    if kernel.power:
        # The exponent of the smallest power of two that is no smaller.
        _, exponent = np.frexp(np.maximum(exact, least))
        power = np.ldexp(1.0, exponent - 1)
        scale = np.where(power * largest < most, 2 * power, power)
    else:
        scale = np.maximum(_nearest(exact, _FORMATS["float32"]), least)
        if kernel.scale == "bfloat16":
            scale = _nearest(scale, _FORMATS["bfloat16"])
    made: Array = np.where(most == 0, 1.0, scale)
    return made


def _scale_bits(dtype: str, scale: Array) -> Array:
    """Return the bits of scales."""
    np = numpy_module()
    if dtype == "float8_e8m0fnu":
        powers: Array = (np.frexp(scale)[1] + 126).astype("u1")
        return powers
    single: Array = scale.astype("f4").view("u4")
    return single if dtype == "float32" else (single // (1 << 16)).astype("u2")


def _rescaled(kernel: Rescale, parts: Sequence[Given], indices: Sequence[Array]) -> Array:
    """Return the bits of the scales of NVFP4 at `indices`, or of the one that divides them: as exact powers of two."""
    np = numpy_module()
    every = values("float8_e8m0fnu", parts[-1].bits.reshape(-1))
    if np.isnan(every).any():
        raise CorruptError(f"{kernel.name}: a scale is NaN.")
    most = max(float(every.max()), 2.0**-119) if every.size else 2.0**-119
    if kernel.made == "global":
        only: Array = np.full([len(each) for each in indices], 256 / most, "f4").view("u4")
        return only
    rows, columns = indices
    codes, scales, _ = parts
    own = values("float8_e8m0fnu", scales.bits[rows - scales.starts[0]][:, columns // 2 - scales.starts[1]])
    wanted = own / most * 256
    places = (columns * 8 - codes.starts[1])[:, None] + np.arange(8)
    sizes = codes.bits[(rows - codes.starts[0])[:, None, None], places[None]] % 128
    has_numbers = ((sizes % 8) + (sizes // 16)).sum(-1) > 0
    if (has_numbers & (wanted < 2.0**-9)).any():
        raise UnsupportedError(f"{kernel.name!r} has scales that are too far apart for NVFP4.")
    table = np.array(_table("float8_e4m3fn"))[:127]
    made: Array = np.where(wanted < 2.0**-9, 0, np.searchsorted(table, wanted)).astype("u1")
    return made


# What makes the bits of a tile, by kernel.
TILES: ByKernel[Callable[[Any, Sequence[Given], Sequence[Array]], Array]] = ByKernel(
    "TILES",
    {
        Dequantize: _dequantized,
        Quantize: _quantized,
        Rescale: _rescaled,
    },
    evaluating=True,
)


class _Format(NamedTuple):
    """A floating-point format: the bits of its significand (with the implicit one), and the exponents of its smallest
    and largest normal numbers. `maximum` is its largest finite number."""

    digits: int
    least: int
    greatest: int

    @property
    def maximum(self) -> float:
        return math.ldexp(2.0 - math.ldexp(1.0, 1 - self.digits), self.greatest)


# IEEE 754-2019, table 3.5; bfloat16 has float32's exponents and eight digits.
_FORMATS = {
    "float64": _Format(53, -1022, 1023),
    "float32": _Format(24, -126, 127),
    "bfloat16": _Format(8, -126, 127),
    "float16": _Format(11, -14, 15),
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
    if target not in _FORMATS or source not in (*_FORMATS, *_BYTES, "float8_e8m0fnu"):
        raise UnsupportedError(f"A cast from {source} to {target} cannot be verified: no reference for it is known.")
    with np.errstate(all="ignore"):
        exact = values(source, bits)
        rounded = _nearest(exact, _FORMATS[target])
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
        elif dtype in _FORMATS:
            array = bits.view(dtype).astype("f8")
        else:
            array = np.array(_table(dtype))[bits]
    return array


def _nearest(exact: Array, format_: _Format) -> Array:
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
    made: Array = (sign << (new_width - 1)) | payload | infinity
    return made


def _layout(dtype: str) -> tuple[int, int]:
    """Return the bits of the mantissa, and of the whole number."""
    mantissa = _FORMATS[dtype].digits - 1 if dtype in _FORMATS else _BYTES[dtype][1] if dtype in _BYTES else 0
    return mantissa, DTYPES[dtype].itemsize * 8


@functools.cache
def _table(dtype: str) -> tuple[float, ...]:
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


def shown(dtype: DType, bits: bytes) -> str:
    """Return an element as text: its value, and its bits if the value does not determine them."""
    np = numpy_module()
    hexadecimal = bits[::-1].hex()
    if dtype.kind == "f":
        return f"{float(values(dtype.name, np.frombuffer(bits, code_of(dtype)))[0])!r} (bits {hexadecimal})"
    if dtype.kind in "iu":
        return str(int.from_bytes(bits, "little", signed=dtype.kind == "i"))
    if dtype.kind == "b" and bits in (b"\0", b"\1"):
        return str(bits == b"\1")
    return f"bits {hexadecimal}"
