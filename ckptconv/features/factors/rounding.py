"""Numbers that are known within a bound, rounded to a dtype if all numbers within the bound round to one number.

A result with an exact definition, such as a sum in float64 in a certain order, can then be computed in a faster way.
Only the few numbers near the middle between two numbers of the dtype need the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.tensors.float_formats import FORMATS, numbers, numpy_module

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

# Rounds an array of float64: returns its bits, and the number of finite values that became infinite.
Casting: TypeAlias = "Callable[[Array], tuple[Array, int]]"
# If more than this part of a block is near a middle, the whole block is computed by the definition.
_FEW = 1 / 16


class Precision(NamedTuple):
    """A dtype to compute in: its name, numpy's code for it and for its bits, and its unit roundoff."""

    dtype: str
    code: str
    bits: str
    unit: float


SINGLE, DOUBLE = Precision("float32", "f4", "u4", 2.0**-24), Precision("float64", "f8", "u8", 2.0**-53)


def precision_for(target: str, inputs: set[str], scalars: Iterable[float]) -> Precision:
    """Return the precision in which to compute numbers from inputs and scalars, for rounding to the dtype `target`. It
    is float32 if the target has a third of its digits, no input has more digits, and no scalar is near the ends of its
    range."""
    is_narrow = FORMATS[target].mantissa < 8 and all(FORMATS[value].mantissa < 24 for value in inputs)
    return SINGLE if is_narrow and all(not value or 2.0**-60 < abs(value) < 2.0**60 for value in scalars) else DOUBLE


def round_certain(
    values: Array, bound: Any, precision: Precision, target: str, out: Array, room: Array, cast: Casting
) -> Array | None:
    """Fill `out` with the bits of `values`, rounded to the dtype `target`.

    `values` are numbers of `precision`, each at most `bound` off, not counting the last rounding error of `precision`
    itself. They and `room`, an array of the same size, are overwritten. Return the indices, in C order, of values that
    may round to another number. Return None if there are many, or if a value is NaN or near infinity: then `out` has no
    meaning.
    """
    np = numpy_module()
    unit = np.dtype(precision.bits).type
    dropped = FORMATS[precision.dtype].mantissa - FORMATS[target].mantissa
    bits, pattern, distance = values.view(precision.bits), room.view(precision.bits), room.view(precision.code)
    peak = float(max(values.max(), -values.min()))
    if not peak < 2.0 ** FORMATS[target].bias:
        return None
    # Rounding changes in the middle between two numbers: there, only the first of the dropped bits is 1.
    np.bitwise_or(bits, unit((1 << dropped) - 1), out=pattern)
    pattern ^= unit((1 << (dropped - 1)) - 1)
    np.subtract(values, distance, out=distance)
    np.abs(distance, out=distance)
    # The last operation rounds once here, and once by the definition, in float64.
    near = np.less_equal(distance, bound + (1.01 if precision is SINGLE else 2.02) * precision.unit * peak)
    if target == "float16":
        # Smaller numbers are subnormal, with other middles.
        near |= np.abs(values, out=distance) < 2.0**-14
    uncertain: Array = np.flatnonzero(near)
    if len(uncertain) > near.size * _FEW:
        return None
    if target == "bfloat16" and precision is SINGLE:
        bits += unit(1 << (dropped - 1))
        bits >>= unit(dropped)
        out[...] = bits
    elif target == "bfloat16":
        out[...] = cast(values)[0]
    else:
        out.view(target)[...] = values
    return uncertain


def numbers_as(code: str, dtype: str, bits: Array) -> Array:
    """Return numbers of a floating dtype as numpy's `code`, which holds them."""
    single = numpy_module().empty(bits.shape, "u4") if dtype == "bfloat16" else bits
    result: Array = numbers(dtype, bits, single).astype(code, copy=False)
    return result
