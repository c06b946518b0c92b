"""The kernels: gathers, casts, byte swaps, sign flips, tiles. Block by block, with numpy.

A kernel works on the bits, as unsigned views, so that no value passes through arithmetic that could change it; only
tiles are computed, as `dequantize` says. numpy is imported when the first kernel runs; a conversion that only copies
never imports it.

A cast rounds the stored value once, to nearest, ties to even. NaN stays NaN, with its sign, the leading bits of its
payload, and the quiet bit set, the same on every machine. Only bfloat16 → float32 keeps all bits unchanged, because a
bfloat16 is the upper half of a float32. A value that rounds beyond the largest finite number becomes infinite, and is
counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.errors import UsageError
from ckptconv.process import go_on
from ckptconv.tensors import quantize as quantizing
from ckptconv.tensors.computing import (
    MOST_COLUMNS,
    MOST_RANK,
    Bits,
    Dequantize,
    Join,
    LowRank,
    Magnitude,
    Overlay,
    Quantize,
    Rescale,
    Tile,
    WeightedSum,
    Xor,
)
from ckptconv.tensors.dequantize import GivenPart, Rounding, dequantize
from ckptconv.tensors.dequantize import fits as fits_codes
from ckptconv.tensors.dtypes import DTYPES, SUMMED, DType, can_cast, itemsize_of_components
from ckptconv.tensors.float_formats import FORMATS, SCALES, float32_table, numpy_module, scratch
from ckptconv.tensors.low_rank import added, lengthened, rounded
from ckptconv.tensors.moves import Cast, Conjugate, Cut, Gather, Kernel, Negate, Runs, Swap
from ckptconv.tensors.quantize import made_dtype, quantize, rescale, rescaled_dtype
from ckptconv.tensors.rounding import numbers

if TYPE_CHECKING:
    from ckptconv.tensors.computing import Tiled
    from ckptconv.tensors.float_formats import Array

Buffer: TypeAlias = "bytes | bytearray | memoryview"

# The sizes of words, and the kinds of dtypes that have signs.
_WORDS, _SIGNED = (1, 2, 4, 8), frozenset("iufc")
# Elements to cast at a time: a block and its temporaries stay in the second-level cache.
_BLOCK = 1 << 16
# Elements that are summed at a time: with the sum, and what is added to it, they stay in the second-level cache.
_SUMMED = 1 << 15
# The tile of a transpose: bytes along the rows of the source, and elements along those of the result, so that both stay
# in the second-level cache. Rows of the source that are a multiple of more than a cache line (bytes) apart would share
# few lines of the first: their tiles go through a copy whose rows are padded by one.
_TILE = (256, 512)
_LINE = 64
# Rows of the source and of the result that are shorter than this (elements) are copied fastest without tiles; those of
# the source only if they are very short, where those of the result fill a tile.
_NARROW, _VERY_NARROW = 32, 8
# numpy scatters runs that are shorter than `_LONG_RUN` bytes, if there are more than `_FEW_RUNS`.
_LONG_RUN, _FEW_RUNS = 4096, 16


# --------------------------------------------------------------------------------------------------------- interface


def apply(kernels: Sequence[Kernel], data: Buffer, out: memoryview | None = None) -> tuple[memoryview, int]:
    """Pass `data` through `kernels` in turn. Return the result, and how many finite values became infinite in a cast.

    `out`, if given, has exactly the result's length, receives it, and may not overlap `data`. Raises UsageError for an
    unsupported cast, ValueError if the data does not fit the kernels.
    """
    go_on()
    view = memoryview(data).cast("B")
    overflows = 0
    for index, kernel in enumerate(kernels):
        if isinstance(kernel, Cut):
            if not 0 <= kernel.start <= kernel.stop <= len(view):
                raise ValueError(f"{kernel} of {len(view)} bytes")
            view = view[kernel.start : kernel.stop]
            continue
        size = _result_size(kernel, len(view))
        last = index == len(kernels) - 1
        if last:
            result = memoryview(numpy_module().empty(size, "u1")) if out is None else out
        else:
            result = scratch(f"kernel {index % 2}", size).data
        _check_room(result, size)
        overflows += FUNCTIONS[type(kernel)](kernel, view, result)
        view = result
    if out is not None and view is not out:
        _check_room(out, len(view))
        out[:] = view
        view = out
    return view, overflows


def scatter(out: memoryview, target: Runs, data: Buffer) -> None:
    """Put `data` at `target` of `out`, run after run. Raises ValueError if it does not fit."""
    offset, length, grid = target
    view = memoryview(data).cast("B")
    end = offset + length + sum((count - 1) * distance for count, distance in grid)
    if len(view) != target.nbytes or offset < 0 or any(n < 1 or d < 0 for n, d in grid) or end > len(out):
        raise ValueError(f"{len(view)} bytes for {target} of {len(out)} bytes")
    if length >= _LONG_RUN or math.prod(count for count, _ in grid) <= _FEW_RUNS:
        for index, at in enumerate(target.offsets()):
            out[at : at + length] = view[index * length : (index + 1) * length]
        return
    np = numpy_module()
    item = math.gcd(length, 8)
    shape = (*(count for count, _ in grid), length // item)
    strides = (*(distance for _, distance in grid), item)
    np.ndarray(shape, f"u{item}", out, offset, strides)[...] = np.frombuffer(view, f"u{item}").reshape(shape)


def _check_room(out: memoryview, size: int) -> None:
    if len(out) != size:
        raise ValueError(f"the kernels make {size} bytes, and there is room for {len(out)}")


def pick(data: memoryview, runs: Runs, out: memoryview | None = None) -> memoryview:
    """Return the `runs` of `data`, one after the other: the inverse of `scatter`.

    Raises ValueError if they exceed `data`.
    """
    offset, length, grid = runs
    if offset < 0 or any(n < 1 or d < 0 for n, d in grid) or runs.stop > len(data):
        raise ValueError(f"{runs} of {len(data)} bytes")
    if not grid:
        return data[offset : offset + length]
    shape, strides = (*(count for count, _ in grid), length), (*(distance for _, distance in grid), 1)
    return apply((Gather(shape, strides, 1),), data[offset : runs.stop], out)[0]


def is_zero(data: memoryview) -> bool:
    """Whether all bytes are zero."""
    return not numpy_module().frombuffer(data, "u1").any()


def _result_size(kernel: Kernel, size: int) -> int:
    """Return how many bytes `kernel` makes from `size` bytes. Raises ValueError if those are not whole elements."""
    if isinstance(kernel, Gather):
        return math.prod(kernel.shape) * kernel.itemsize
    if isinstance(kernel, Tile):
        return math.prod(kernel.counts) * DTYPES[kernel.cast or tile_dtype(kernel.kernel)].itemsize
    before, after = _ELEMENTS[type(kernel)].sizes(kernel)
    if size % before:
        raise ValueError(f"{kernel}: {size} bytes are not whole elements of {before}")
    return size // before * after


# ------------------------------------------------------------------------------------------------- gathers and swaps


def _gather(kernel: Gather, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    shape, strides, item = kernel
    if not math.prod(shape):
        return 0
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    if min(strides, default=0) < 0 or last + item > len(data):
        raise ValueError(f"{kernel} leaves its {len(data)} bytes")
    shape, strides, item = _widened(shape, strides, item)
    # numpy has no unsigned integer of 16 bytes; a complex number is copied bit by bit as well.
    dtype = np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(item, f"V{item}"))
    dims = _merged(shape, strides)
    counts = tuple(count for count, _ in dims)
    source = np.ndarray(counts, dtype, data, 0, tuple(stride for _, stride in dims))
    result = np.ndarray(counts, dtype, out)
    rows = _transposed_axis(dims)
    if rows is None:
        result[...] = source
        return 0
    # Each array holds one plane for every index of the other axes.
    planes = (np.moveaxis(array, (rows, -1), (-2, -1)) for array in (source, result))
    _transpose(*planes)
    return 0


def _widened(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> Gather:
    """Return the same gather with larger elements, of up to 16 bytes, as a copy costs by the element.

    Elements are combined as far as they are adjacent in both source and result.
    """
    while shape and shape[-1] == 1:
        shape, strides = shape[:-1], strides[:-1]
    if shape and strides[-1] == item:
        together = math.gcd(shape[-1] * item, 16)
        if together > item:
            shape, strides = (*shape[:-1], shape[-1] * item // together), (*strides[:-1], together)
            return Gather(shape, strides, together)
    return Gather(shape, strides, item)


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (count, stride) for each axis. Drop axes of one element; merge axes that continue each other."""
    dims: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if dims and dims[-1][1] == count * stride:
            dims[-1] = (dims[-1][0] * count, stride)
        else:
            dims.append((count, stride))
    return dims


def _transposed_axis(dims: list[tuple[int, int]]) -> int | None:
    """Return the axis along which the source is contiguous; None if that is the last, as it is in the result.

    Return None also if too little is transposed to be worth tiles.
    """
    counts = [count for count, _ in dims]
    axis = min(range(len(dims)), key=lambda axis: dims[axis][1] or math.inf, default=0)
    if axis >= len(dims) - 1 or not dims[-1][1]:
        return None
    least = _VERY_NARROW if counts[-1] >= _TILE[1] else _NARROW
    return axis if min(counts[axis], counts[-1]) >= least else None


def _transpose(source: Array, result: Array) -> None:
    """Copy `source` to `result` tile by tile. `source` is contiguous along the first of their last two axes."""
    np = numpy_module()
    *planes, height, width = source.shape
    item, apart = source.itemsize, source.strides[-1]
    rows, columns = min(max(_TILE[0] // item, 1), height), min(_TILE[1], width)
    padded = None if apart & -apart <= _LINE else np.empty((columns, rows + _LINE // min(item, _LINE)), source.dtype)
    for plane in np.ndindex(*planes):
        for top in range(0, height, rows):
            for left in range(0, width, columns):
                place = (*plane, slice(top, top + rows), slice(left, left + columns))
                tile = source[place]
                if padded is not None:
                    copy = padded[: tile.shape[1], : tile.shape[0]]
                    copy[...] = tile.T
                    tile = copy.T
                result[place] = tile


def _swap(kernel: Swap, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    np.frombuffer(out, f"<u{kernel.itemsize}")[...] = np.frombuffer(data, f">u{kernel.itemsize}")
    return 0


def _bits(kernel: Bits, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    values = np.frombuffer(data, f"<u{kernel.itemsize}") >> kernel.shift
    values &= values.dtype.type((1 << kernel.width) - 1)
    np.frombuffer(out, f"<u{kernel.result}")[...] = values
    return 0


def _join(kernel: Join, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    result = np.frombuffer(out, f"<u{kernel.result}")
    result[...] = 0
    at = 0
    for itemsize, shift, width in kernel.kinds:
        values = np.frombuffer(data, f"<u{itemsize}", len(result), at)
        if width < 8 * itemsize and (values >> width).any():
            raise UsageError(f"A value is {int(values.max())}, and is to be stored in {width} bits.")
        result |= values.astype(result.dtype) << result.dtype.type(shift)
        at += values.nbytes
    return 0


# ------------------------------------------------------------------------------------------------------------ deltas


def _xor(kernel: Xor, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    blocks = np.frombuffer(data, "u1").reshape(kernel.blocks, -1)
    result = np.frombuffer(out, "u1")
    np.bitwise_xor(blocks[0], blocks[1], out=result)
    for block in blocks[2:]:
        result ^= block
    return 0


def _overlay(kernel: Overlay, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    result = np.frombuffer(out, "u1")
    result[...] = np.frombuffer(data, "u1", len(out))
    for units in np.frombuffer(data, "u1", offset=len(out)).reshape(kernel.layers, len(out), 2):
        values, mask = units[:, 0], units[:, 1]
        result &= ~mask
        result |= values & mask
    return 0


# -------------------------------------------------------------------------------------------------------------- sums


def _weighted_sum(kernel: WeightedSum, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    total = np.frombuffer(out, "f8")
    inputs, at = [], 0
    for dtype in kernel.dtypes:
        inputs.append(np.frombuffer(data, f"u{DTYPES[dtype].itemsize}", len(total), at))
        at += inputs[-1].nbytes
    size = min(_SUMMED, len(total))
    single, product = np.empty(size, "u4"), np.empty(size, "f8")
    with np.errstate(all="ignore"):
        for start in range(0, len(total), _SUMMED):
            block = total[start : start + _SUMMED]
            for number, (dtype, bits, weight) in enumerate(zip(kernel.dtypes, inputs, kernel.weights, strict=True)):
                values = numbers(dtype, bits[start : start + _SUMMED], single[: len(block)])
                term = block if number == 0 else product[: len(block)]
                term[...] = values
                if weight != 1:
                    term *= weight
                if number:
                    block += term
            if kernel.over != 1:
                block /= kernel.over
            # Which NaN comes out of arithmetic depends on the processor.
            if math.isnan(block.sum()):
                block[np.isnan(block)] = np.nan
    return 0


# ------------------------------------------------------------------------------------------------------------- signs


def _negate(kernel: Negate, data: memoryview, out: memoryview) -> int:
    """Negate integers as torch does, modulo 2ⁿ; flip the sign of a float, or of both parts of a complex number."""
    np = numpy_module()
    dtype = DTYPES[kernel.dtype]
    code = f"u{itemsize_of_components(dtype)}"
    source, result = np.frombuffer(data, code), np.frombuffer(out, code)
    if dtype.kind in "iu":
        np.negative(source, out=result)
    elif dtype.kind in "fc" and dtype.name not in SCALES:
        np.bitwise_xor(source, source.dtype.type(_sign(source)), out=result)
        if dtype.name in FORMATS and FORMATS[dtype.name].specials == "fnuz":
            # In this format the bits of minus zero are NaN: keep zero and NaN as they are.
            special = (source & 0x7F) == 0
            result[special] = source[special]
    else:
        raise UsageError(f"A tensor of {dtype} cannot be negated.")
    return 0


def _conjugate(kernel: Conjugate, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    dtype = DTYPES[kernel.dtype]
    out[:] = data
    if dtype.kind == "c":
        parts = np.frombuffer(out, f"u{itemsize_of_components(dtype)}")
        imaginary = parts[1::2]
        np.bitwise_xor(imaginary, parts.dtype.type(_sign(parts)), out=imaginary)
    return 0


def _sign(bits: Array) -> int:
    return 1 << (8 * bits.itemsize - 1)


# ------------------------------------------------------------------------------------------------------------- casts


def _cast(kernel: Cast, data: memoryview, out: memoryview) -> int:
    source, target = kernel
    if not can_cast(source, target):
        raise UsageError(f"Tensors of {source} cannot be cast to {target}.")
    if source == target:
        out[:] = data
        return 0
    np = numpy_module()
    steps = _steps(source, target)
    before, after = DTYPES[source].itemsize, DTYPES[target].itemsize
    elements = np.frombuffer(data, f"u{before}")
    result = np.frombuffer(out, f"u{after}")
    block = min(_BLOCK, len(elements))
    between = scratch("cast", 4 * block).view("u4") if len(steps) > 1 else None
    room = scratch("cast too", 4 * block).view("u4")
    overflows = 0
    # Overflow is counted; numpy's warnings of invalid NaNs and inexact subnormals are expected.
    with np.errstate(all="ignore"):
        for start in range(0, len(elements), block or 1):
            values = elements[start : start + block]
            for step in steps[:-1]:
                assert between is not None
                overflows += step(values, between[: len(values)], room[: len(values)])
                values = between[: len(values)]
            overflows += steps[-1](values, result[start : start + block], room[: len(values)])
    return overflows


# A step of a cast: takes the source bits, the result bits, and scratch space of as many uint32. Returns how many finite
# values became infinite.
_Step: TypeAlias = "Callable[[Array, Array, Array], int]"


@functools.cache
def _steps(source: str, target: str) -> tuple[_Step, ...]:
    """Return the steps of a cast: at most one exact step to float32, then at most one that may round."""
    direct: dict[tuple[str, str], _Step] = {
        ("bfloat16", "float32"): _upper_half,
        ("float32", "bfloat16"): _round_to_bfloat16,
        ("float64", "bfloat16"): _round_twice_to_bfloat16,
        ("float16", "float32"): functools.partial(_by_hardware, "float16", "float32"),
        ("float32", "float16"): functools.partial(_by_hardware, "float32", "float16"),
        ("float32", "float64"): functools.partial(_by_hardware, "float32", "float64"),
        ("float64", "float32"): functools.partial(_by_hardware, "float64", "float32"),
        ("float64", "float16"): functools.partial(_by_hardware, "float64", "float16"),
    }
    if (source, target) in direct:
        return (direct[source, target],)
    first = direct.get((source, "float32")) or functools.partial(_look_up, float32_table(source))
    return (first,) if target == "float32" else (first, direct["float32", target])


def _upper_half(source: Array, result: Array, scratch: Array) -> int:
    result[...] = source
    result <<= 16
    return 0


def _round_to_bfloat16(source: Array, result: Array, scratch: Array) -> int:
    _nearest_upper_half(source, result, scratch)
    return _mend("float32", "bfloat16", source, result)


def _nearest_upper_half(source: Array, result: Array, scratch: Array) -> None:
    # Adding half a step, less one where the result would be even, carries into the upper half when it has to round up.
    numpy_module().right_shift(source, 16, out=scratch)
    scratch &= 1
    scratch += 0x7FFF
    scratch += source
    scratch >>= 16
    result[...] = scratch


def _round_twice_to_bfloat16(source: Array, result: Array, scratch: Array) -> int:
    """Round float64 → float32 → bfloat16, such that the first rounding does not affect the second."""
    np = numpy_module()
    values, halfway = source.view("f8"), scratch.view("f4")
    halfway[...] = values
    # Only a float32 exactly between two bfloat16 can mislead: move it to the side of the original value.
    (ties,) = np.nonzero((scratch & 0xFFFF) == 0x8000)
    if len(ties):
        was, became = np.abs(values[ties]), np.abs(halfway[ties].astype("f8"))
        scratch[ties] += (was > became).astype("u4") - (was < became).astype("u4")
    _nearest_upper_half(scratch, result, np.empty_like(scratch))
    return _mend("float64", "bfloat16", source, result)


def _by_hardware(before: str, after: str, source: Array, result: Array, scratch: Array) -> int:
    """Convert as numpy does, in one correct rounding, with the processor's instruction or without."""
    result.view(after)[...] = source.view(before)
    return _mend(before, after, source, result)


def _look_up(table: Array, source: Array, result: Array, scratch: Array) -> int:
    numpy_module().take(table, source, out=result, mode="clip")
    return 0


def _mend(before: str, after: str, source: Array, result: Array) -> int:
    """Set the results of NaNs, which differ between hardware and libraries. Return the number of overflows."""
    np = numpy_module()
    source_format, format_ = FORMATS[before], FORMATS[after]
    widening = format_.mantissa >= source_format.mantissa
    least = source_format.infinity if widening else format_.overflow(source_format)
    sign = _sign(source)
    # As signed integers, the maximum is the largest positive value; as unsigned, it is the negative value of largest
    # magnitude, if there is a negative one.
    if max(int(source.view(f"i{source.itemsize}").max()), int(source.max()) & (sign - 1)) < least:
        return 0
    magnitude = source & source.dtype.type(sign - 1)
    (nans,) = np.nonzero(magnitude > source_format.infinity)
    if len(nans):
        distance = format_.mantissa - source_format.mantissa
        payload = magnitude[nans].astype("u8") & ((1 << source_format.mantissa) - 1)
        payload = payload << distance if distance > 0 else payload >> -distance
        signs = (source[nans] >> (8 * source.itemsize - 1)).astype("u8") << (8 * result.itemsize - 1)
        result[nans] = signs | payload | (format_.infinity | format_.quiet)
    if widening:
        return 0
    return int(np.count_nonzero((magnitude >= least) & (magnitude < source_format.infinity)))


# --------------------------------------------------------------------------------------------------------------- tiles


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


def _low_rank(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    assert isinstance(tile.kernel, LowRank)
    if not tile.cast:
        added(tile.kernel, tile.boxes, arrays, out)
        return 0
    cast = functools.partial(_cast_array, Cast(tile_dtype(tile.kernel), tile.cast))
    return rounded(tile.kernel, tile.boxes, arrays, tile.cast, out.view(f"u{out.itemsize}"), cast)


def _cast_array(cast: Cast, values: Array) -> tuple[Array, int]:
    """Return the bits of an array after a cast, and how many finite values became infinite."""
    made, overflows = apply((cast,), numpy_module().ascontiguousarray(values).data)
    return numpy_module().frombuffer(made, f"u{DTYPES[cast.target].itemsize}").reshape(values.shape), overflows


def _magnitude(tile: Tile, arrays: Sequence[Array], out: Array) -> int:
    lengthened(tile.boxes, arrays, tile.starts, out)
    return 0


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

    step = _steps("float32", dtype)[0] if dtype != "float32" else _copy
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


def _fits_factors(tensor: Tiled) -> bool:
    if len(tensor.shape) != 2 or len(tensor.parts) != 3 or not _are_numbers(tensor):
        return False
    left, right = tensor.parts[1:]
    along = [[(axis.dim, axis.num, axis.den) for axis in axes] for axes in tensor.axes]
    if [len(axes) for axes in along] != [2, 2, 2]:
        return False
    dims = along[1][0][0], along[2][1][0]
    inner = left.shape[1] == right.shape[0] <= MOST_RANK and along[1][1][1] == along[2][0][1] == 0
    return (
        inner
        and along[0] == [(0, 1, 1), (1, 1, 1)]
        and {along[1][0], along[2][1]} == {(dim, 1, 1) for dim in (0, 1)}
        and (dims in ((0, 1), (1, 0)))
    )


def _fits_rows(tensor: Tiled) -> bool:
    if len(tensor.shape) != 2 or len(tensor.parts) != 2 or not _are_numbers(tensor):
        return False
    along = [[(axis.dim, axis.num) for axis in axes] for axes in tensor.axes]
    ones = all(axis.den == 1 for axes in tensor.axes for axis in axes)
    stop = tensor.starts[1] + tensor.shape[1]
    return ones and along == [[(0, 1), (1, 0)], [(0, 1)]] and stop <= tensor.parts[0].shape[1] <= MOST_COLUMNS


def _are_numbers(tensor: Tiled) -> bool:
    return not tensor.whole and all(part.dtype.name in SUMMED for part in tensor.parts)


# What makes the tiles of a `Tiled`.
TILING: dict[type[Any], TileMaker] = {
    Dequantize: TileMaker("dequantize", "float32", _dequantized, _fits_codes),
    Quantize: TileMaker("quantize", made_dtype, _quantized, _fits_blocks),
    Rescale: TileMaker("rescale", rescaled_dtype, _rescaled, _fits_powers),
    LowRank: TileMaker("low rank", "float64", _low_rank, _fits_factors),
    Magnitude: TileMaker("magnitude", "float64", _magnitude, _fits_rows),
}


def tile_dtype(kernel: Kernel) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    dtype = TILING[type(kernel)].dtype
    return dtype if isinstance(dtype, str) else dtype(kernel)


def _tile(tile: Tile, data: memoryview, out: memoryview) -> int:
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


# ------------------------------------------------------------------------------------------------------------- table


class ElementMaker(NamedTuple):
    """How a kernel makes each element of the result of an element of each input.

    `name` is its name in JSON. `run` takes the kernel, the inputs one after the other, and room for the result, and
    returns how many finite values became infinite. `sizes` gives the bytes of an element of all inputs, and of the
    result. `fits` says whether the kernel makes elements of a dtype of such of others.
    """

    name: str
    run: Callable[[Any, memoryview, memoryview], int]
    sizes: Callable[[Any], tuple[int, int]]
    fits: Callable[[Any, Sequence[DType], DType], bool]


def _of_dtype(kernel: Negate | Conjugate) -> tuple[int, int]:
    return (DTYPES[kernel.dtype].itemsize,) * 2


def _fits_words(kernel: Bits, before: Sequence[DType], after: DType) -> bool:
    return (
        (kernel.itemsize, kernel.result) == (before[0].itemsize, after.itemsize)
        and {kernel.itemsize, kernel.result} <= {*_WORDS}
        and 0 < kernel.width <= 8 * kernel.result
        and kernel.shift + kernel.width <= 8 * kernel.itemsize
    )


def _fits_kinds(kernel: Join, before: Sequence[DType], after: DType) -> bool:
    return (
        [dtype.itemsize for dtype in before] == [size for size, _, _ in kernel.kinds]
        and kernel.result == after.itemsize
        and kernel.result in _WORDS
        and all(
            size in _WORDS and 0 < width <= 8 * size and shift + width <= 8 * kernel.result
            for size, shift, width in kernel.kinds
        )
    )


def _fits_terms(kernel: WeightedSum, before: Sequence[DType], after: DType) -> bool:
    return (
        kernel.dtypes == tuple(dtype.name for dtype in before)
        and SUMMED.issuperset(kernel.dtypes)
        and len(kernel.weights) == len(before)
        and bool(kernel.over)
        and after.name == "float64"
    )


def _fits_layers(before: Sequence[DType], after: DType, layers: int, size: int) -> bool:
    """Whether there are `layers` of elements of `size` bytes above one of single bytes."""
    first, *others = (dtype.itemsize for dtype in before)
    return first == after.itemsize == 1 and len(others) == layers and {*others} <= {size}


# What converts the elements of a `Convert`, and what joins those of a `Joined`.
CONVERTING: dict[type[Any], ElementMaker] = {
    Cast: ElementMaker(
        "cast",
        _cast,
        lambda kernel: (DTYPES[kernel.source].itemsize, DTYPES[kernel.target].itemsize),
        lambda kernel, before, after: (
            kernel == (before[0].name, after.name) and before[0] != after and can_cast(*kernel)
        ),
    ),
    Swap: ElementMaker(
        "swap",
        _swap,
        lambda kernel: (kernel.itemsize, kernel.itemsize),
        lambda kernel, before, after: (
            before[0].itemsize == after.itemsize and kernel.itemsize in _WORDS and after.itemsize % kernel.itemsize == 0
        ),
    ),
    Negate: ElementMaker(
        "negate",
        _negate,
        _of_dtype,
        lambda kernel, before, after: kernel.dtype == before[0].name == after.name and after.kind in _SIGNED,
    ),
    Conjugate: ElementMaker(
        "conjugate",
        _conjugate,
        _of_dtype,
        lambda kernel, before, after: kernel.dtype == before[0].name == after.name and after.kind == "c",
    ),
    Bits: ElementMaker("bits", _bits, lambda kernel: (kernel.itemsize, kernel.result), _fits_words),
}
JOINING: dict[type[Any], ElementMaker] = {
    Join: ElementMaker(
        "join", _join, lambda kernel: (sum(size for size, _, _ in kernel.kinds), kernel.result), _fits_kinds
    ),
    Xor: ElementMaker(
        "xor",
        _xor,
        lambda kernel: (kernel.blocks, 1),
        lambda kernel, before, after: _fits_layers(before, after, kernel.blocks - 1, 1),
    ),
    Overlay: ElementMaker(
        "overlay",
        _overlay,
        lambda kernel: (1 + 2 * kernel.layers, 1),
        lambda kernel, before, after: _fits_layers(before, after, kernel.layers, 2),
    ),
    WeightedSum: ElementMaker(
        "sum", _weighted_sum, lambda kernel: (sum(DTYPES[dtype].itemsize for dtype in kernel.dtypes), 8), _fits_terms
    ),
}
_ELEMENTS = CONVERTING | JOINING
FUNCTIONS = {made: maker.run for made, maker in _ELEMENTS.items()} | {Gather: _gather, Tile: _tile}
