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
from ckptconv.tensors.dequantize import Rounding, dequantize
from ckptconv.tensors.dtypes import DTYPES, can_cast, itemsize_of_components
from ckptconv.tensors.float_formats import FORMATS, SCALES, float32_table, numpy_module, scratch
from ckptconv.tensors.low_rank import added, lengthened, rounded
from ckptconv.tensors.moves import (
    Bits,
    Cast,
    Conjugate,
    Cut,
    Dequantize,
    Gather,
    Join,
    Kernel,
    LowRank,
    Magnitude,
    Negate,
    Overlay,
    Quantize,
    Rescale,
    Runs,
    Swap,
    Tile,
    TileKernel,
    WeightedSum,
    Xor,
)
from ckptconv.tensors.quantize import made_dtype, quantize, rescale, rescaled_dtype
from ckptconv.tensors.rounding import numbers

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

Buffer: TypeAlias = "bytes | bytearray | memoryview"

# Elements to cast at a time: a block and its temporaries stay in the second-level cache.
_BLOCK = 1 << 16
# Elements that are summed at a time: with the sum, and what is added to it, they stay in the second-level cache.
_SUMMED = 1 << 15
# The tile of a transpose: elements along the rows of the source and of the result. It goes through a copy whose rows
# are padded by a cache line (bytes): rows a power of two apart would all map to the same lines.
_TILE = (512, 64)
_LINE = 64
# A transposed axis shorter than this is copied fastest without tiles.
_NARROW = 32
# numpy scatters runs that are shorter than `_LONG_RUN` bytes, if there are more than `_FEW_RUNS`.
_LONG_RUN, _FEW_RUNS = 4096, 16


# --------------------------------------------------------------------------------------------------------- interface


def apply(kernels: Sequence[Kernel], data: Buffer, out: memoryview | None = None) -> tuple[memoryview, int]:
    """Pass `data` through `kernels` in turn. Return the result, and how many finite values became infinite in a cast.

    `out`, if given, has exactly the result's length, receives it, and may not overlap `data`. Raises UsageError for an
    unsupported cast, ValueError if the data does not fit the kernels.
    """
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
        overflows += _KERNELS[type(kernel)](kernel, view, result)
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
    if isinstance(kernel, Cast):
        before, after = DTYPES[kernel.source].itemsize, DTYPES[kernel.target].itemsize
    elif isinstance(kernel, Bits):
        before, after = kernel.itemsize, kernel.result
    elif isinstance(kernel, Join):
        before, after = sum(itemsize for itemsize, _, _ in kernel.kinds), kernel.result
    elif isinstance(kernel, WeightedSum):
        before, after = sum(DTYPES[dtype].itemsize for dtype in kernel.dtypes), 8
    elif isinstance(kernel, (Xor, Overlay)):
        before, after = (kernel.blocks if isinstance(kernel, Xor) else 1 + 2 * kernel.layers), 1
    elif isinstance(kernel, Swap):
        before = after = kernel.itemsize
    else:
        assert isinstance(kernel, (Negate, Conjugate))
        before = after = DTYPES[kernel.dtype].itemsize
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
    if axis >= len(dims) - 1 or not dims[-1][1] or min(counts[axis], counts[-1]) < _NARROW:
        return None
    return axis


def _transpose(source: Array, result: Array) -> None:
    """Copy `source` to `result` tile by tile. `source` is contiguous along the first of their last two axes."""
    np = numpy_module()
    *planes, height, width = source.shape
    rows, columns = min(_TILE[0], height), min(_TILE[1], width)
    scratch = np.empty((columns, rows + _LINE // min(source.itemsize, _LINE)), source.dtype)
    for plane in np.ndindex(*planes):
        for top in range(0, height, rows):
            for left in range(0, width, columns):
                place = (*plane, slice(top, top + rows), slice(left, left + columns))
                tile = source[place].T
                copy = scratch[: tile.shape[0], : tile.shape[1]]
                copy[...] = tile
                result[place] = copy.T


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
    np.bitwise_xor.reduce(blocks, axis=0, out=np.frombuffer(out, "u1"))
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
    """How a kernel makes a tile: the dtype of its elements, or what tells it, and the function that fills an array of
    them.

    It takes the tile, the bits of its inputs (unsigned integers in the shapes of the boxes), and the array. It returns
    how many finite values became infinite in a cast.
    """

    dtype: str | Callable[[Any], str]
    fill: Callable[[Tile, Sequence[Array], Array], int]


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


_TILES: dict[type[Any], TileMaker] = {
    Dequantize: TileMaker("float32", _dequantized),
    Quantize: TileMaker(made_dtype, _quantized),
    Rescale: TileMaker(rescaled_dtype, _rescaled),
    LowRank: TileMaker("float64", _low_rank),
    Magnitude: TileMaker("float64", _magnitude),
}


def tile_dtype(kernel: TileKernel) -> str:
    """Return the dtype of the elements that `kernel` makes."""
    dtype = _TILES[type(kernel)].dtype
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
    maker = _TILES[type(tile.kernel)]
    dtype = DTYPES[tile.cast or tile_dtype(tile.kernel)]
    code = f"f{dtype.itemsize}" if dtype.name in ("float64", "float32", "float16") else f"u{dtype.itemsize}"
    return maker.fill(tile, arrays, np.frombuffer(out, code).reshape(tile.counts))


_KERNELS: dict[type[Any], Callable[[Any, memoryview, memoryview], int]] = {
    Gather: _gather,
    Cast: _cast,
    Swap: _swap,
    Negate: _negate,
    Conjugate: _conjugate,
    Bits: _bits,
    Join: _join,
    Xor: _xor,
    Overlay: _overlay,
    WeightedSum: _weighted_sum,
    Tile: _tile,
}
