"""The kernel `Dequantize`: weights from codes, scales and zero points.

The arithmetic is float32, as in the programs that read such weights; its result is rounded once more if
`Dequantize.between` says so. A NaN among the codes stays NaN. Codes are looked up and multiplied some rows at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.features.quantized.computing import Dequantize
from ckptconv.tensors.computing import Box
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.float_formats import FORMATS, SCALES, float32_table, numpy_module, scratch

if TYPE_CHECKING:
    from ckptconv.tensors.computing import Axis
    from ckptconv.tensors.float_formats import Array

# AutoAWQ's `packing_utils.py`: the element that each 4 bits of a word hold, the lowest bits first.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
# No product of finite numbers up to this rounds to infinity in a dtype: in float32 and bfloat16, and in float16.
_LARGEST, _LARGEST_HALF = 3e38, 65504.0
# Elements that are decoded at a time: they, and what is made of them, stay in the second-level cache.
CHUNK = 64 << 10
# The largest magnitudes of codes: in floats of 8 bits, and in integers, less a zero point of 8 bits.
_LARGEST_CODE = {"float8_e5m2": 57344.0, "float8_e4m3fn": 448.0}
_LARGEST_INTEGER = 511.0
_AGAIN = "Download it again."


class _Kind(NamedTuple):
    """The layout of codes: `bits` per code, packed into words of `word` bits with the low bits first; 0 for one element
    per code. `values` are the numbers that codes stand for, if not for themselves; `order` is the order of a word's
    codes."""

    bits: int = 0
    word: int = 0
    values: tuple[float, ...] = ()
    order: tuple[int, ...] = ()


def _floats(exponent: int, mantissa: int) -> tuple[float, ...]:
    """Return the numbers of the codes of a float with so many bits, and neither infinity nor NaN: OCP Microscaling
    Formats 1.0, tables 3 to 5. The highest bit is the sign."""
    steps = 1 << mantissa
    bias = (1 << (exponent - 1)) - 1
    sizes = []
    for code in range(1 << (exponent + mantissa)):
        power, fraction = divmod(code, steps)
        sizes.append((fraction + steps * (power > 0)) * 2.0 ** (max(power, 1) - bias - mantissa))
    return (*sizes, *(-size for size in sizes))


_SIGNED = (*range(8), *range(-8, 0))
_KINDS: Mapping[str, _Kind] = {
    "own": _Kind(),
    "table8": _Kind(),
    "table4": _Kind(4, 8),
    "e2m1": _Kind(4, 8, _floats(2, 1)),
    "e2m3": _Kind(6, 8, _floats(2, 3)),
    "e3m2": _Kind(6, 8, _floats(3, 2)),
    "quarters": _Kind(4, 8, tuple(sign * count / 4 for sign in (1.0, -1.0) for count in range(8))),
    **{f"int{bits}": _Kind(bits, 32) for bits in range(1, 9)},
    "awq": _Kind(4, 32, order=_AWQ),
    "signed4": _Kind(4, 32, _SIGNED),
    "signed awq": _Kind(4, 32, _SIGNED, _AWQ),
    "signed pair": _Kind(4, 8, _SIGNED),
}
# Those that are numbers as they are: nothing is subtracted from them.
_NUMBERS = frozenset(("e2m1", "e2m3", "e3m2", "quarters", "table4", "table8"))


class _Place(NamedTuple):
    """The tile: its dimensions in the order that the codes have, the interval of each dimension, and by dimension the
    group of each of its elements."""

    order: tuple[int, ...]
    reach: tuple[tuple[int, int], ...]
    groups: Mapping[int, Array]


class _Input(NamedTuple):
    """An input: its box, and its elements in the shape of that."""

    box: Box
    array: Array


class Rounding(NamedTuple):
    """A dtype, and the rounding to its bits: `into` rounds float32 into an array of the same shape, and returns how
    many finite values became infinite."""

    dtype: str
    into: Callable[[Array, Array], int]


def dequantize(
    kernel: Dequantize,
    boxes: Sequence[Box],
    arrays: Sequence[Array],
    starts: Sequence[int],
    out: Array,
    rounding: Rounding,
) -> int:
    """Fill `out`, of the bits that `rounding` makes, with the tile from index `starts` on, of the `arrays` of bits that
    are in `boxes`. Return how many finite values became infinite when they were rounded.

    Raise CorruptError for scales that are not finite, that are 0 where the code is not, or that make weights infinite,
    for factors of 0, and for a group that is not there.
    """
    np = numpy_module()
    inputs = map(_Input, boxes, arrays)
    given = dict(zip(("codes", *kernel.roles), inputs, strict=True))
    reach = tuple((start, start + count) for start, count in zip(starts, out.shape, strict=True))
    place = _Place(tuple(axis.dim for axis in boxes[0].axes), reach, _groups(kernel, given))
    table = given["table"].array.view("f4") if "table" in given else None
    with np.errstate(all="ignore"):
        zero = None
        floats = {role: given[role]._replace(array=_numbers(given[role])) for role in _FLOATS if role in given}
        is_float = "zero" in given and given["zero"].box.dtype in _DTYPES["shift"]
        if is_float:
            floats["zero"] = given["zero"]._replace(array=_numbers(given["zero"]))
            zero = _expanded(floats["zero"], place, len(reach))
        elif "zero" in given:
            stored = "own" if given["zero"].box.dtype == "int8" else kernel.codes
            zero = _expanded(_decoded(stored, given["zero"], reach, -kernel.offset, None), place, len(reach)).copy()
        every = [*(entry.array for entry in floats.values()), *([table] if table is not None else [])]
        if not all(np.isfinite(numbers).all() for numbers in every):
            raise CorruptError(f"{kernel.scales}: a scale, or another number for decoding, is NaN or infinite.", _AGAIN)
        if "times" in floats and not floats["times"].array.all():
            raise CorruptError(f"{kernel.scales}: a factor of the weight is 0.", _AGAIN)
        result = out.transpose(place.order)
        codes = given["codes"]
        sizes = {role: float(np.abs(entry.array).max(initial=0)) for role, entry in floats.items()}
        code = _LARGEST_CODE.get(codes.box.dtype, _LARGEST_INTEGER) + sizes.get("zero", 0.0)
        largest = sizes["scale"] * code
        largest = largest * max(sizes.get("times", 1.0), 1.0) + sizes.get("shift", 0.0)
        most = _LARGEST_HALF if "float16" in (kernel.between, rounding.dtype) else _LARGEST
        unsure = kernel.over or table is not None or largest > most or not floats["scale"].array.all()
        factors = {role: _grouped(floats[role], place) for role in _FLOATS if role in floats}
        offset = kernel.offset if zero is None or is_float else 0
        overflows = 0
        for rows, values in _blocks(kernel.codes, codes, reach, offset, table):
            if zero is not None:
                values = np.subtract(values, _rows(zero, rows), out=values)
            if is_float and kernel.between != "float32":
                values = _rounded(values, kernel.between)
            here = {role: _rows(factor, rows) for role, factor in factors.items()}
            product = _combined(np.divide if kernel.over else np.multiply, values, here["scale"])
            if "times" in here:
                product = _combined(np.multiply, product, here["times"])
            if "shift" in here:
                product = product if kernel.between == "float32" else _rounded(product, kernel.between)
                product = _combined(np.add, product, here["shift"])
            # Rounded to the dtype that is wanted, it is that anyway.
            if kernel.between != "float32" and (unsure or kernel.between != rounding.dtype):
                product = _rounded(product, kernel.between)
            if unsure:
                _check(kernel, values, here["scale"], product)
            overflows += _put(product, result[rows], rounding)
    return overflows


def _put(values: Array, out: Array, rounding: Rounding) -> int:
    """Put float32 into `out`, rounded. Return how many finite values became infinite."""
    if out.flags.c_contiguous and values.flags.c_contiguous:
        return rounding.into(values, out)
    bits = scratch("rounded", values.size * out.itemsize).view(out.dtype).reshape(values.shape)
    overflows = rounding.into(numpy_module().ascontiguousarray(values), bits)
    out[...] = bits
    return overflows


def _check(kernel: Dequantize, values: Array, factor: Array, product: Array) -> None:
    """Raise CorruptError for a scale of 0 where the code is not, and for finite codes that became infinite."""
    np = numpy_module()
    groups = factor.shape[-1]
    codes = values if groups in (1, values.shape[-1]) else values.reshape(*values.shape[:-1], groups, -1)
    factor = factor if codes is values else factor[..., None]
    # bitsandbytes' quantizer gives the scale 0 to what is equal to its mean, which is added.
    is_lost = "shift" not in kernel.roles and ((factor == 0) & (codes != 0)).any()
    if (kernel.over and not factor.all()) or is_lost:
        raise CorruptError(f"{kernel.scales}: a scale is 0, but its code is not.", _AGAIN)
    if (np.isinf(product) & np.isfinite(values)).any():
        raise CorruptError(f"{kernel.scales}: a scale is so large that weights become infinite.", _AGAIN)


# The dtypes of the inputs, by what they are; of codes and zeros, by how they lie.
_BYTES = frozenset(("uint8", "int8", "float8_e4m3fn", "float8_e5m2"))
_PACKED = {8: frozenset(("uint8", "int8")), 32: frozenset(("int32", "uint32"))}
_DTYPES = {
    "scale": frozenset(("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu")),
    "index": frozenset(("int32",)),
    "table": frozenset(("float32",)),
    "times": frozenset(("float32", "bfloat16", "float16")),
    "shift": frozenset(("float32", "bfloat16", "float16")),
}
_FLOATS = ("scale", "times", "shift")


class GivenPart(NamedTuple):
    """The known facts of an input as a whole."""

    dtype: str
    axes: Sequence[Axis]
    shape: Sequence[int]


def fits(kernel: Dequantize, parts: Sequence[GivenPart], dims: int) -> bool:
    """Return whether `kernel` can compute a tensor of `dims` dimensions from such `parts`."""
    roles = ("codes", *kernel.roles)
    if kernel.codes not in _KINDS or len(roles) != len(parts) or kernel.roles[:1] != ("scale",):
        return False
    given = dict(zip(roles, parts, strict=True))
    if len(given) < len(roles) or not given.keys() <= {"codes", "zero", *_DTYPES}:
        return False
    if kernel.between not in ("float32", "bfloat16", "float16") or (kernel.codes[:5] == "table") != ("table" in given):
        return False
    # Looked-up values are numbers, not codes that others are subtracted from.
    if kernel.codes in _NUMBERS and (kernel.offset or "zero" in given):
        return False
    indexed = [axis.dim for axis in given["index"].axes] if "index" in given else []
    every = sorted(axis.dim for axis in parts[0].axes) == list(range(dims)) and len(indexed) == ("index" in given)
    return every and all(_part_fits(kernel, role, part, indexed) for role, part in given.items())


def _part_fits(kernel: Dequantize, role: str, part: GivenPart, indexed: Sequence[int]) -> bool:
    bits, word = packing(kernel.codes)
    is_packed = bits > 0 and (role == "codes" or (role == "zero" and part.dtype in _PACKED[word] - {"int8"}))
    packed = [axis for axis in part.axes if is_packed and (axis.num, axis.den) == (bits, word)]
    others = [axis for axis in part.axes if axis not in packed]
    known = _DTYPES.get(role, _PACKED[word] if is_packed else _BYTES)
    # Zero points of codes that are integers may be floats.
    known = known | _DTYPES["shift"] if role == "zero" and not is_packed else known
    if part.dtype not in known or len(packed) != is_packed or len({axis.dim for axis in part.axes}) < len(part.axes):
        return False
    if role == "table":  # each element needs all of it
        count = 256 if kernel.codes == "table8" else 16
        return not any(axis.num for axis in part.axes) and tuple(part.shape) == (count,)
    if role in ("codes", "index"):
        return all((axis.num, axis.den) == (1, 1) for axis in others)
    if role in ("times", "shift") and tuple(part.shape) == (1,) and not part.axes[0].num:
        return part.axes[0].dim not in indexed  # one for all
    return all(axis.num == 1 or (not axis.num and axis.dim in indexed) for axis in others)


def _groups(kernel: Dequantize, given: Mapping[str, _Input]) -> dict[int, Array]:
    """Return the group of each element of the dimension that the part `index` is about. Raise CorruptError for one
    that is not there."""
    if "index" not in given:
        return {}
    box, array = given["index"]
    numbers = array.view("i4")
    dim = box.axes[0].dim
    counts = [
        extent
        for role in ("scale", "zero")
        if role in given
        for axis, extent in zip(given[role].box.axes, given[role].box.counts, strict=True)
        if axis.dim == dim and not axis.num
    ]
    count = min(counts, default=1 << 31)
    if numbers.size and not 0 <= (least := int(numbers.min())) <= (most := int(numbers.max())) < count:
        raise CorruptError(
            f"{kernel.scales}: a column has group {least if least < 0 else most}, but the groups of the weight are 0 "
            f"to {count - 1}."
        )
    return {dim: numbers}


# --------------------------------------------------------------------------------------------------------------- codes


def packing(codes: str) -> tuple[int, int]:
    """Return the bits of a code, and those of the words that codes of this kind are packed into; 0 for whole bytes."""
    return _KINDS[codes][:2]


def _blocks(
    codes: str, given: _Input, reach: Sequence[tuple[int, int]], offset: int, table: Array | None
) -> Iterator[tuple[tuple[slice, ...], Array]]:
    """Yield the codes of a tile, less `offset`, as float32: some rows at a time, with where they are; all at once if
    words hold codes of several rows."""
    box, array = given
    packed = _packed(codes, box)
    most = CHUNK * (packing(codes)[0] or 8) // (8 * array.itemsize)
    for rows in _cuts(array.shape, most) if packed in (None, array.ndim - 1) else [()]:
        yield rows, _decoded(codes, given._replace(array=array[rows]), reach, offset, table).array


def _packed(codes: str, box: Box) -> int | None:
    """Return the dimension along which codes are packed into words; None if they are not."""
    words = (dim for dim, axis in enumerate(box.axes) if (axis.num, axis.den) == packing(codes))
    return next(words, None)


def _cuts(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield some rows at a time of an array, of about `most` elements."""
    if len(shape) < 2:
        yield ()
        return
    *outer, rows, width = shape
    step = max(most // max(width, 1), 1)
    for index in numpy_module().ndindex(*outer):
        ahead = [slice(at, at + 1) for at in index]
        for first in range(0, rows, step):
            yield (*ahead, slice(first, first + step))


def _decoded(codes: str, given: _Input, reach: Sequence[tuple[int, int]], offset: int, table: Array | None) -> _Input:
    """Return the codes, less `offset`, as float32: those of the tile along the dimension in which they are packed."""
    np = numpy_module()
    box, array = given
    bits, word, stands_for, order = _KINDS[codes]
    packed = _packed(codes, box)
    if packed is None:
        return _Input(box, _looked_up(_of_bytes(box.dtype, offset) if table is None else table, array))
    low, high = reach[box.axes[packed].dim]
    begin = low - box.starts[packed] * word // bits  # of the first element, if words begin at one
    if bits == 4 and packed == array.ndim - 1:
        pairs = _pairs(codes, offset) if table is None else _paired(table, True)
        decoded = _looked_up(pairs, np.ascontiguousarray(array).view("u1")).view("f4")
    elif word % bits == 0:
        shifts = np.arange(0, word, bits, dtype=array.dtype).reshape(-1, *(1,) * (array.ndim - 1 - packed))
        wide = (np.expand_dims(array, packed + 1) >> shifts) & array.dtype.type((1 << bits) - 1)
        decoded = _valued(wide.reshape(*array.shape[:packed], -1, *array.shape[packed + 1 :]), stands_for, offset)
    else:
        at = np.arange(low, high, dtype="i8") * bits - box.starts[packed] * word
        after = np.minimum(at // word + 1, array.shape[packed] - 1)
        shape = (-1, *(1,) * (array.ndim - 1 - packed))
        both = np.take(array, after, packed).astype("u8") << np.uint64(word) | np.take(array, at // word, packed)
        wide = (both >> (at % word).astype("u8").reshape(shape)) & np.uint64((1 << bits) - 1)
        decoded = _valued(wide, stands_for, offset)
        begin = 0
    if order:
        words = decoded.reshape(*decoded.shape[:-1], -1, len(order))
        decoded = np.take(words, np.argsort(order), -1).reshape(decoded.shape)
    decoded = decoded[(slice(None),) * packed + (slice(begin, begin + high - low),)]
    axes = tuple(axis._replace(num=1, den=1) if dim == packed else axis for dim, axis in enumerate(box.axes))
    first = tuple(low if dim == packed else start for dim, start in enumerate(box.starts))
    return _Input(box._replace(axes=axes, starts=first, counts=decoded.shape), decoded)


def _valued(codes: Array, stands_for: Sequence[float], offset: int) -> Array:
    """Return the numbers that codes stand for, less `offset`, as float32."""
    np = numpy_module()
    numbers: Array = np.array(stands_for, "f4")[codes] if stands_for else codes.astype("f4")
    numbers -= np.float32(offset)
    return numbers


@functools.cache
def _of_bytes(dtype: str, offset: int) -> Array:
    """Return the float32 of each code of an 8-bit dtype, less `offset`."""
    np = numpy_module()
    kind = DTYPES[dtype].kind
    if kind in "iu":
        values: Array = np.arange(256, dtype="u1").view(f"{kind}1").astype("f4")
    else:
        # One NaN for all, which multiplication keeps.
        values = float32_table(dtype).view("f4").copy()
        values[np.isnan(values)] = np.nan
    return values - np.float32(offset) if offset else values


def _looked_up(numbers: Array, at: Array) -> Array:
    """Return the `numbers` at the indices `at`; valid until the next call."""
    out = scratch("codes", at.size * numbers.itemsize).view(numbers.dtype).reshape(at.shape)
    result: Array = numpy_module().take(numbers, at, mode="clip", out=out)
    return result


@functools.cache
def _pairs(codes: str, offset: int) -> Array:
    return _paired(_valued(numpy_module().arange(16), _KINDS[codes].values, offset), False)


def _paired(values: Array, high_first: bool) -> Array:
    """Return the two of the 16 `values` that each of the 256 bytes holds, as one number of their bits."""
    np = numpy_module()
    codes = np.arange(256)
    halves = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    both: Array = np.stack([values[half] for half in halves], 1).astype("f4").view("u8").reshape(-1)
    return both


# -------------------------------------------------------------------------------------------------------------- scales


def _numbers(given: _Input) -> Array:
    """Return floats, of whatever dtype, as float32."""
    np = numpy_module()
    name = given.box.dtype
    if name == "bfloat16":
        numbers: Array = (given.array.astype("u4") << 16).view("f4")
    elif name in SCALES or DTYPES[name].itemsize == 1:
        numbers = np.take(float32_table(name).view("f4"), given.array, mode="clip")
    else:
        assert name in FORMATS
        numbers = given.array.view(name).astype("f4")
    return numbers


def _expanded(given: _Input, place: _Place, dims: int) -> Array:
    """Return one element for each of the tile along the first `dims` of its dimensions, or one for all of them.

    The dimensions are those of `place.order`; an input that lacks one has one element along it.
    """
    np = numpy_module()
    box, array = given
    here = {axis.dim: at for at, axis in enumerate(box.axes)}
    for dim in place.order[:dims]:
        at = here.get(dim, -1)
        if at < 0 or (array.shape[at] == 1 and dim not in place.groups):
            continue
        _, num, den = box.axes[at]
        low, high = place.reach[dim]
        if not num:
            array = np.take(array, place.groups[dim], at)
        elif (num, den) != (1, 1):
            array = np.take(array, np.arange(low, high) * num // den - box.starts[at], at)
    array = array.transpose([here[dim] for dim in place.order if dim in here])
    missing = tuple(number for number, dim in enumerate(place.order) if dim not in here)
    expanded: Array = np.expand_dims(array, missing) if missing else array
    return expanded


def _grouped(scale: _Input, place: _Place) -> Array:
    """Return the scales of the tile, expanded along all dimensions but the last if all groups of that are whole."""
    last = place.order[-1] if place.order else -1
    axis = next((axis for axis in scale.box.axes if axis.dim == last), None)
    low, high = place.reach[last] if place.order else (0, 0)
    is_whole = axis is not None and axis.num == 1 < axis.den and low % axis.den == high % axis.den == 0
    return _expanded(scale, place, len(place.order) - is_whole)


def _combined(combine: Callable[..., Array], values: Array, factor: Array) -> Array:
    """Return `values` combined with factors: one for each value, for all, or for each group of the last dimension."""
    product: Array = scratch("product", values.size * 4).view("f4").reshape(values.shape)
    groups = factor.shape[-1] if factor.ndim else 1
    if groups in (1, values.shape[-1] if values.ndim else 1):
        combine(values, factor, out=product)
    else:
        shape = (*values.shape[:-1], groups, values.shape[-1] // groups)
        combine(values.reshape(shape), factor[..., None], out=product.reshape(shape))
    return product


def _rows(array: Array, rows: tuple[slice, ...]) -> Array:
    """Return the part of an array, some of whose dimensions have one element for all, that is for `rows` of a tile."""
    part: Array = array[
        tuple(cut if extent > 1 else slice(None) for cut, extent in zip(rows, array.shape, strict=False))
    ]
    return part


def _rounded(values: Array, dtype: str) -> Array:
    """Round float32 to nearest, ties to even, to numbers of a dtype of 16 bits."""
    np = numpy_module()
    format_ = FORMATS[dtype]
    shift = 23 - format_.mantissa
    bits = values.view("u4")
    half = bits >> shift
    half &= 1
    half += (1 << shift - 1) - 1
    half += bits
    half &= 0xFFFFFFFF >> shift << shift
    rounded: Array = half.view("f4")
    nans = np.isnan(values)
    if nans.any():
        rounded[nans] = values[nans]
    if dtype == "float16":
        # Its subnormal numbers are multiples of 2^-24, which is the last bit of numbers near 0.75.
        small = np.abs(values) < 2.0**-14
        rounded[small] = np.copysign((values[small] + np.float32(0.75)) - np.float32(0.75), values[small])
        rounded[rounded > _LARGEST_HALF] = np.inf
        rounded[rounded < -_LARGEST_HALF] = -np.inf
    return rounded
