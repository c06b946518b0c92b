"""An independent evaluator for the kernels of quantized weights, with arithmetic of its own, for verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.quantized.computing import Dequantize, Largest, Quantize, QuantizeFp4, Rescale
from ckptconv.features.verify.arithmetic import FORMATS, Format, InputBox, nearest, table_of, values
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.float_formats import numpy_module

if TYPE_CHECKING:
    from ckptconv.features.verify.arithmetic import Array

# The bits of a code, and those of the word that it lies in; the value of each code of a float (OCP Microscaling Formats
# 1.0, section 5.3); and the place in a word that AutoAWQ gives to each of eight.
_PACKED = {
    "e2m1": (4, 8),
    "e2m3": (6, 8),
    "e3m2": (6, 8),
    "quarters": (4, 8),
    "table4": (4, 8),
    "signed pair": (4, 8),
    **{f"int{bits}": (bits, 32) for bits in range(1, 9)},
    **dict.fromkeys(("awq", "signed4", "signed awq"), (4, 32)),
}
_E2M1 = [sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
_E2M3 = [sign * value / 8 for sign in (1.0, -1.0) for value in (*range(16), *range(16, 32, 2), *range(32, 64, 4))]
_E3M2 = [
    sign * value / 16
    for sign in (1.0, -1.0)
    for step in (0, 1, 2, 4, 8, 16, 32, 64)
    for value in ([0, 1, 2, 3] if not step else [mantissa * step for mantissa in (4, 5, 6, 7)])
]
_QUARTERS = [sign * value for sign in (1.0, -1.0) for value in (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75)]
_VALUES = {"e2m1": _E2M1, "e2m3": _E2M3, "e3m2": _E3M2, "quarters": _QUARTERS}
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def _dequantized(kernel: Dequantize, parts: Sequence[InputBox], indices: Sequence[Array]) -> Array:
    """Return the bits of the weights at `indices`: each product in float64, rounded as the kernel says."""
    np = numpy_module()
    given = dict(zip(("codes", *kernel.roles), parts, strict=True))
    table = values("float32", given["table"].bits) if "table" in given else None
    group = given["index"].bits.astype("i4")[given["index"].place(indices)[0]] if "index" in given else None
    with np.errstate(all="ignore"):
        codes = _codes(kernel.codes, given["codes"], indices, table)
        less = codes - kernel.offset
        if "zero" in given:
            # Packed as the codes are; bytes, or floats, which are rounded as such.
            stored = kernel.codes if given["zero"].dtype in ("int32", "uint32", "uint8") else "own"
            less = less - _codes(stored, given["zero"], indices, None, group)
            if given["zero"].dtype in FORMATS:
                less = nearest(less, FORMATS[kernel.between])
        scale = given["scale"]
        factor = values(scale.dtype, _looked_up(scale, indices, group))
        if not np.isfinite(factor).all():
            raise CorruptError(f"{kernel.scales}: a scale is NaN or infinite.")
        exact = less / factor if kernel.over else less * factor
        weights = nearest(exact, FORMATS["float32"])
        if "times" in given:
            times = values(given["times"].dtype, _looked_up(given["times"], indices, group))
            if not np.isfinite(times).all() or not times.all():
                raise CorruptError(f"{kernel.scales}: a factor of the weight is 0, NaN or infinite.")
            weights = nearest(weights * times, FORMATS["float32"])
        if "shift" in given:
            weights = nearest(weights, FORMATS[kernel.between])
            added = values(given["shift"].dtype, _looked_up(given["shift"], indices, group))
            weights = nearest(weights + added, FORMATS["float32"])
        weights = nearest(weights, FORMATS[kernel.between])
        lost = (factor == 0) & (less != 0) & ("shift" not in given)
        if (lost | (np.isinf(weights) & np.isfinite(codes))).any():
            raise CorruptError(f"{kernel.scales}: a scale is too large, or is 0 although its code is not.")
        single = np.where(np.isnan(weights), np.nan, weights).astype("f4").view("u4")
        result: Array = np.broadcast_to(single, [len(positions) for positions in indices])
    return result


def _looked_up(given: InputBox, indices: Sequence[Array], group: Array | None) -> Array:
    """Return the elements of an input for those of a tile, those of a dimension that is whole by `group`."""
    place = given.place(indices)
    for dim, axis in enumerate(given.axes):
        if not axis.num and group is not None:
            if group.size and not 0 <= group.min() <= group.max() < given.bits.shape[dim]:
                raise CorruptError(
                    f"A column has group {group.min() if group.min() < 0 else group.max()}, but the groups of the "
                    f"weight are 0 to {given.bits.shape[dim] - 1}."
                )
            place[dim] = group
    elements: Array = given.bits[tuple(place)]
    return elements


def _codes(
    codes: str, given: InputBox, indices: Sequence[Array], table: Array | None, group: Array | None = None
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
    integers: Array = np.zeros((), "i8")
    # A code may begin in one word and end in the next: then it is taken bit by bit.
    taken = width if word % width == 0 else 1
    for bit in range(0, width, taken):
        place = given.place(indices) if group is None else _placed(given, indices, group)
        place[dim] = ((first + bit) // word - given.starts[dim]).reshape(shape)
        words = given.bits[tuple(place)].astype("i8")
        integers = integers + (words // (1 << ((first + bit) % word).reshape(shape)) % (1 << taken) << bit)
    numbers: Array = integers.astype("f8")
    if table is not None:
        numbers = table[integers]
    elif codes in _VALUES:
        numbers = np.array(_VALUES[codes])[integers]
    elif codes.startswith("signed"):
        numbers = numbers - 16 * (numbers > 7)
    return numbers


def _placed(given: InputBox, indices: Sequence[Array], group: Array) -> list[Array]:
    place = given.place(indices)
    return [group if not axis.num else at for axis, at in zip(given.axes, place, strict=True)]


def _within(codes: str, number: Array, count: int) -> Array:
    """Return which of the `count` places in a word, from the lowest bits on, the codes of these numbers have."""
    places: Array = numpy_module().array(_AWQ)[number] if codes.endswith("awq") else number
    return count - 1 - places if codes == "table4" else places


def _plain(dtype: str, bits: Array) -> Array:
    """Return numbers of an 8-bit dtype as float64."""
    return bits.view(f"{DTYPES[dtype].kind}1").astype("f8") if dtype in ("uint8", "int8") else values(dtype, bits)


def _quantized(kernel: Quantize, parts: Sequence[InputBox], indices: Sequence[Array]) -> Array:
    """Return the bits of codes or scales at `indices`: the exact value of each step in float64, rounded as it is
    stored."""
    np = numpy_module()
    (given,) = parts
    *ahead, rows, columns = indices
    of_scales = kernel.made == "scales"
    packed = 1 if of_scales else {"int4": 8, "e2m1": 2}.get(kernel.codes, 1)
    sides = kernel.rows, kernel.columns
    # The blocks, and from there on the numbers that are needed of each dimension.
    blocks = [
        positions // (1 if of_scales else side) for positions, side in zip((rows, columns * packed), sides, strict=True)
    ]
    bounds = [(positions[0] * side, (positions[-1] + 1) * side) for positions, side in zip(blocks, sides, strict=True)]
    cuts = [slice(low - start, high - start) for (low, high), start in zip(bounds, given.starts[-2:], strict=True)]
    experts = (
        np.ix_(*(positions - start for positions, start in zip(ahead, given.starts, strict=False))) if ahead else ...
    )
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
        losses = np.stack([_loss_of(few[..., 0, :, :], candidate) for candidate in scales])
        scale = np.take_along_axis(np.stack(scales), losses.argmin(0)[None], 0)[0]
    if of_scales:
        bits: Array = _scale_bits(kernel.scale, scale)
        return bits
    quotient = nearest(few / scale[..., :, None, :, None], FORMATS["float32"]).reshape(filled.shape)
    if kernel.codes == "int4":
        codes = np.clip(np.rint(quotient), -8, 7)
        exact = codes
        wide = (codes + 8).astype("u4").reshape(*codes.shape[:-1], -1, 8)
        stored = sum(wide[..., at] * np.uint32(16**at) for at in range(8))
    elif kernel.codes == "e2m1":
        exact = nearest(np.clip(quotient, -6, 6), Format(2, 0, 2))
        nibbles = (np.searchsorted(_E2M1[:8], np.abs(exact)) + 8 * np.signbit(quotient)).astype("u1")
        stored = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    else:
        exact = nearest(np.clip(quotient, -448, 448), Format(4, -6, 8))
        fraction, exponent = np.frexp(np.abs(exact))
        place = np.where(np.abs(exact) < 2.0**-6, np.abs(exact) * 512, exponent * 8 + 40 + fraction * 16)
        stored = (place + 128 * np.signbit(quotient)).astype("u1")
    if kernel.exact:
        again = exact.reshape(few.shape) * scale[..., :, None, :, None]
        if (again != few).any():
            raise UnsupportedError(f"{kernel.name!r} has numbers that codes and scales cannot represent exactly.")
    at = rows - bounds[0][0], columns - bounds[1][0] // packed
    taken: Array = stored[..., at[0][:, None], at[1]]
    return taken


def _loss_of(groups: Array, scale: Array) -> Array:
    """Return the squares of what codes from −8 to 7 are off by in each of `groups`, added by halves in float32, times
    that of the scale."""
    np = numpy_module()
    single = FORMATS["float32"]
    quotient = nearest(groups / scale[..., None], single)
    terms = nearest((quotient - np.clip(np.rint(quotient), -8, 7)) ** 2, single)
    for _ in range(groups.shape[-1].bit_length() - 1):
        terms = nearest(terms.reshape(*terms.shape[:-1], 2, -1).sum(-2), single)
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
        scale = np.maximum(nearest(exact, FORMATS["float32"]), least)
        if kernel.scale == "bfloat16":
            scale = nearest(scale, FORMATS["bfloat16"])
    scales: Array = np.where(most == 0, 1.0, scale)
    return scales


def _scale_bits(dtype: str, scale: Array) -> Array:
    """Return the bits of scales."""
    np = numpy_module()
    if dtype == "float8_e8m0fnu":
        powers: Array = (np.frexp(scale)[1] + 126).astype("u1")
        return powers
    single: Array = scale.astype("f4").view("u4")
    return single if dtype == "float32" else (single // (1 << 16)).astype("u2")


def _rescaled(kernel: Rescale, parts: Sequence[InputBox], indices: Sequence[Array]) -> Array:
    """Return the bits of the scales of NVFP4 at `indices`, or of the one that divides them: as exact powers of two."""
    np = numpy_module()
    every = values("float8_e8m0fnu", parts[-1].bits.reshape(-1))
    if np.isnan(every).any():
        raise CorruptError(f"{kernel.name}: a scale is NaN.")
    most = max(float(every.max()), 2.0**-119) if every.size else 2.0**-119
    if kernel.made == "global":
        only: Array = np.full([len(positions) for positions in indices], 256 / most, "f4").view("u4")
        return only
    rows, columns = indices
    codes, scales, _ = parts
    own = values("float8_e8m0fnu", scales.bits[rows - scales.starts[0]][:, columns // 2 - scales.starts[1]])
    wanted = own / most * 256
    places = (columns * 8 - codes.starts[1])[:, None] + np.arange(8)
    sizes = codes.bits[(rows - codes.starts[0])[:, None, None], places[None]] % 128
    has_numbers = ((sizes % 8) + (sizes // 16)).sum(-1) > 0
    if (has_numbers & (wanted < 2.0**-9)).any():
        raise UnsupportedError(f"{kernel.name!r} has scales in a wider range than NVFP4 allows.")
    table = np.array(table_of("float8_e4m3fn"))[:127]
    bits: Array = np.where(wanted < 2.0**-9, 0, np.searchsorted(table, wanted)).astype("u1")
    return bits


def _largest(kernel: Largest, parts: Sequence[InputBox], indices: Sequence[Array]) -> Array:
    """Return the bits of largest absolute values at `indices`, or of the scale of a weight."""
    np = numpy_module()
    if kernel.made == "rows":
        (given,) = parts
        rows, columns = indices
        largest = np.empty((len(rows), len(columns)))
        numbers = np.abs(values(given.dtype, given.bits[rows - given.starts[0]]))
        if not np.isfinite(numbers).all():
            raise UnsupportedError(f"{kernel.name!r} has NaN or infinity.")
        for at, column in enumerate(columns):
            low = column * kernel.columns - given.starts[1]
            largest[:, at] = numbers[:, low : low + kernel.columns].max(-1)
    else:
        most = max(float(values("float32", part.bits).max(initial=0)) for part in parts)
        # A finite number, and no subnormal one.
        once = nearest(np.array(1 / most if most and kernel.made == "over" else most), FORMATS["float32"])
        over, times = min(float(once) * 2688, FORMATS["float32"].maximum), max(most / 2688, 2.0**-126)
        scale = over if kernel.made == "over" else times
        largest = np.full([len(positions) for positions in indices], scale if most else 1.0)
    single: Array = nearest(largest, FORMATS["float32"]).astype("f4").view("u4")
    return single


def _quantized_fp4(kernel: QuantizeFp4, parts: Sequence[InputBox], indices: Sequence[Array]) -> Array:
    """Return the bits of codes or scales at `indices`: each step in float64, rounded to float32."""
    np = numpy_module()

    def single(exact: Array) -> Array:
        rounded: Array = nearest(exact, FORMATS["float32"])
        return rounded

    given, side = parts[0], 32 if kernel.rule == "mx" else 16
    rows, columns = indices
    # The blocks that are needed, one after the other, and where each element is in them.
    blocks = np.unique(columns // (side // 2)) if kernel.made == "codes" else columns
    places = (blocks[:, None] * side + np.arange(side)).reshape(-1) - given.starts[1]
    numbers = values(given.dtype, given.bits[(rows - given.starts[0])[:, None], places[None]])
    numbers = numbers.reshape(len(rows), len(blocks), side)
    if not np.isfinite(numbers).all():
        raise UnsupportedError(f"{kernel.name!r} has NaN or infinity.")
    most = np.abs(numbers).max(-1)
    if kernel.rule == "mx":
        fraction, exponent = np.frexp(most)
        power = np.where(most < 2.0**-126, -127, exponent - 1 + (fraction >= 0.875))
        power = np.maximum(power - 2, -127)
        bits, factor = (power + 127).astype("u1"), np.ldexp(1.0, power)
    else:
        whole = float(values("float32", parts[1].bits)[0])
        if kernel.rule == "over":
            scale = nearest(np.minimum(single(single(most / 6) * whole), 448), Format(4, -6, 8))
            scale = np.where(scale == 0, 0.125, scale)
            factor = single(scale / whole)
        else:
            quotient = single(most / single(np.float64(6 * whole)))
            scale = nearest(np.clip(quotient, 2.0**-9, 448), Format(4, -6, 8))
            scale = np.where(quotient == 0, 1.0, scale)
            factor = single(scale * whole)
        bits = np.searchsorted(np.array(table_of("float8_e4m3fn"))[:127], scale).astype("u1")
    if kernel.made == "scales":
        scale_bits: Array = bits
        return scale_bits
    quotient = single(numbers / factor[..., None])
    sizes = nearest(np.minimum(np.abs(quotient), 6), Format(2, 0, 2))
    codes = (np.searchsorted(_E2M1[:8], sizes) + 8 * (numbers < 0)).astype("u1").reshape(len(rows), -1)
    pairs = codes[:, ::2] + 16 * codes[:, 1::2]
    taken: Array = pairs[:, np.searchsorted(blocks, columns // (side // 2)) * (side // 2) + columns % (side // 2)]
    return taken


TILES: dict[type[Any], Callable[[Any, Sequence[InputBox], Sequence[Array]], Array]] = {
    Dequantize: _dequantized,
    Quantize: _quantized,
    Rescale: _rescaled,
    Largest: _largest,
    QuantizeFp4: _quantized_fp4,
}
