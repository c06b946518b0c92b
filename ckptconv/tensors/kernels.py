"""The kernels: gathers, casts, byte swaps, sign flips. Block by block, with numpy.

A kernel works on the bits, as unsigned views, so that no value passes through arithmetic that could change it; only
tiles are computed, as `dequantize` says. numpy is imported when the first kernel runs; a conversion that only copies
never imports it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.errors import UsageError
from ckptconv.process import go_on
from ckptconv.tensors.casts import cast, sign_of, vanished
from ckptconv.tensors.computing import Bits, Join, Tile
from ckptconv.tensors.dtypes import DTYPES, DType, can_cast, itemsize_of_components
from ckptconv.tensors.float_formats import FORMATS, SCALES, numpy_module, scratch
from ckptconv.tensors.moves import Cast, Conjugate, Cut, Gather, Kernel, Negate, Runs, Swap
from ckptconv.tensors.registered import ByKernel

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

Buffer: TypeAlias = "bytes | bytearray | memoryview"

# The sizes of words, and the kinds of dtypes that have signs.
_WORDS, _SIGNED = (1, 2, 4, 8), frozenset("iufc")
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


class Lost(NamedTuple):
    """Numbers of finite values that casts made infinite, of nonzero values that casts made zero, and of NaN sums."""

    infinite: int = 0
    zero: int = 0
    nan: int = 0


def apply(kernels: Sequence[Kernel], data: Buffer, out: memoryview | None = None) -> tuple[memoryview, Lost]:
    """Pass `data` through `kernels` in turn. Return the result, and how many values were lost.

    `out`, if given, has exactly the result's length, receives it, and may not overlap `data`. Raises UsageError for an
    unsupported cast, ValueError if the data does not fit the kernels.
    """
    go_on()
    view = memoryview(data).cast("B")
    lost = Counter[str]()
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
        lost[getattr(kernel, "counted", "infinite")] += FUNCTIONS[type(kernel)](kernel, view, result)
        if isinstance(kernel, Cast):
            lost["zero"] += vanished(kernel, view, result)
        view = result
    if out is not None and view is not out:
        _check_room(out, len(view))
        out[:] = view
        view = out
    return view, Lost(**lost)


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
        raise ValueError(f"the kernels make {size} bytes, but the buffer holds {len(out)}")


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
    """Return whether all bytes are zero."""
    return not numpy_module().frombuffer(data, "u1").any()


def _result_size(kernel: Kernel, size: int) -> int:
    """Return the size of the result of `kernel` for `size` bytes. Raises ValueError if those are not whole elements."""
    if isinstance(kernel, Gather):
        return math.prod(kernel.shape) * kernel.itemsize
    if isinstance(kernel, Tile):
        from ckptconv.tensors.tile_kernels import tile_dtype

        return math.prod(kernel.counts) * DTYPES[kernel.cast or tile_dtype(kernel.kernel)].itemsize
    maker = CONVERTING.get(type(kernel)) or JOINING[type(kernel)]
    before, after = maker.sizes(kernel)
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
            raise UsageError(f"The value {int(values.max())} does not fit into {width} bits.")
        result |= values.astype(result.dtype) << result.dtype.type(shift)
        at += values.nbytes
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
        np.bitwise_xor(source, source.dtype.type(sign_of(source)), out=result)
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
        np.bitwise_xor(imaginary, parts.dtype.type(sign_of(parts)), out=imaginary)
    return 0


# --------------------------------------------------------------------------------------------------------------- tiles


def _tile(tile: Tile, data: memoryview, out: memoryview) -> int:
    from ckptconv.tensors.tile_kernels import fill  # most checkpoints have no tensor that is computed

    return fill(tile, data, out)


# ------------------------------------------------------------------------------------------------------------- table


class ElementMaker(NamedTuple):
    """A kernel that computes each element of the result from an element of each input.

    `name` is its name in JSON. `run` takes the kernel, the inputs one after the other, and room for the result, and
    returns how many finite values became infinite; how many are NaN if the kernel has `counted = "nan"`. `sizes` gives
    the bytes of an element of all inputs, and of the result. `fits` says whether the kernel converts elements of given
    dtypes to elements of another.
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


class _Functions(dict[type[Any], Callable[[Any, memoryview, memoryview], int]]):
    """The function that carries out each kernel; for a feature's kernel, that of its `run`."""

    def __missing__(self, kernel: type[Any]) -> Callable[[Any, memoryview, memoryview], int]:
        return self.setdefault(kernel, JOINING[kernel].run)


# Kernels that convert the elements of a `Convert`, and kernels that join those of a `Joined`.
CONVERTING: dict[type[Any], ElementMaker] = {
    Cast: ElementMaker(
        "cast",
        cast,
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
JOINING = ByKernel(
    "JOINING",
    {
        Join: ElementMaker(
            "join", _join, lambda kernel: (sum(size for size, _, _ in kernel.kinds), kernel.result), _fits_kinds
        ),
    },
)
FUNCTIONS = _Functions(
    {kernel: maker.run for kernel, maker in (*CONVERTING.items(), *JOINING.items())} | {Gather: _gather, Tile: _tile}
)
