"""Casts of elements from one dtype to another, on their bits, block by block. With numpy.

A cast rounds the stored value once, to nearest, ties to even. NaN stays NaN, with its sign, the leading bits of its
payload, and the quiet bit set, the same on every machine. Only bfloat16 → float32 keeps all bits unchanged, because a
bfloat16 is the upper half of a float32. Values that become infinite, or zero, are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ckptconv.errors import UsageError
from ckptconv.tensors.dtypes import DTYPES, can_cast
from ckptconv.tensors.float_formats import FORMATS, SCALES, float32_table, numpy_module, scratch
from ckptconv.tensors.moves import Cast

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

# Elements to cast at a time: a block and its temporaries stay in the second-level cache.
_BLOCK = 1 << 16


def cast(kernel: Cast, data: memoryview, out: memoryview) -> int:
    source, target = kernel
    if not can_cast(source, target):
        raise UsageError(f"Tensors of {source} cannot be cast to {target}.")
    if source == target:
        out[:] = data
        return 0
    np = numpy_module()
    steps = steps_of(source, target)
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


def vanished(kernel: Cast, data: memoryview, out: memoryview) -> int:
    """Return how many numbers of `data` that are not zero `kernel` made zero in `out`."""
    source, target = kernel
    if source not in SCALES and FORMATS[source].least >= FORMATS[target].least:
        return 0
    zeros = _zeros(target, out)
    return zeros - _zeros(source, data) if zeros and source not in SCALES else zeros


def _zeros(dtype: str, data: memoryview) -> int:
    np = numpy_module()
    bits = np.frombuffer(data, FORMATS[dtype].code)
    magnitude = bits.dtype.type(sign_of(bits) - 1)
    blocks = range(0, len(bits), _BLOCK)
    return len(bits) - sum(int(np.count_nonzero(bits[at : at + _BLOCK] & magnitude)) for at in blocks)


# A step of a cast: takes the source bits, the result bits, and scratch space of as many uint32. Returns how many finite
# values became infinite.
Step: TypeAlias = "Callable[[Array, Array, Array], int]"


@functools.cache
def steps_of(source: str, target: str) -> tuple[Step, ...]:
    """Return the steps of a cast: at most one exact step to float32, then at most one that may round."""
    direct: dict[tuple[str, str], Step] = {
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
    sign = sign_of(source)
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


def sign_of(bits: Array) -> int:
    return 1 << (8 * bits.itemsize - 1)
