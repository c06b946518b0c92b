"""Numbers that are known within a bound, rounded to a dtype where all that is within the bound rounds to one number.

What is exact by definition, such as a sum in float64 in a certain order, can then be computed in another way that is
faster; only the few numbers near the middle between two of the result's need the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.tensors.float_formats import FORMATS, numpy_module

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

# Rounds an array of float64: returns its bits, and how many finite numbers became infinite.
Casting: TypeAlias = "Callable[[Array], tuple[Array, int]]"
# If more than this part of a block is near a middle, all of it is worth the definition.
_FEW = 1 / 16


class Precision(NamedTuple):
    """A dtype to compute in: its name, numpy's code for it and for its bits, and its unit roundoff."""

    dtype: str
    code: str
    bits: str
    unit: float


SINGLE, DOUBLE = Precision("float32", "f4", "u4", 2.0**-24), Precision("float64", "f8", "u8", 2.0**-53)


def precision_for(target: str, inputs: set[str], scalars: Iterable[float]) -> Precision:
    """Return in what to compute numbers that are rounded to the dtype `target`, from inputs and scalars: in float32 if
    that has a third of its digits, no input has more than it, and no scalar is near the ends of its range."""
    is_narrow = FORMATS[target].mantissa < 8 and all(FORMATS[each].mantissa < 24 for each in inputs)
    return SINGLE if is_narrow and all(not each or 2.0**-60 < abs(each) < 2.0**60 for each in scalars) else DOUBLE


def round_certain(
    values: Array, bound: Any, precision: Precision, target: str, out: Array, room: Array, cast: Casting
) -> Array | None:
    """Fill `out` with the bits of `values`, rounded to the dtype `target`.

    `values` are numbers of `precision`, each at most `bound` off, before the rounding error of its own; they and
    `room`, an array of as many, are overwritten. Return the indices, in C order, of those that may round otherwise;
    None if they are many, or some are no number or near infinity: then `out` has no meaning.
    """
    np = numpy_module()
    unit = np.dtype(precision.bits).type
    dropped = FORMATS[precision.dtype].mantissa - FORMATS[target].mantissa
    bits, other, distance = values.view(precision.bits), room.view(precision.bits), room.view(precision.code)
    peak = float(max(values.max(), -values.min()))
    if not peak < 2.0 ** FORMATS[target].bias:
        return None
    # What is rounded changes in the middle between two numbers: of the bits that are dropped, only the first is 1.
    np.bitwise_or(bits, unit((1 << dropped) - 1), out=other)
    other ^= unit((1 << (dropped - 1)) - 1)
    np.subtract(values, distance, out=distance)
    np.abs(distance, out=distance)
    # The last operation rounds once here, and once where the numbers are defined, in float64.
    near = np.less_equal(distance, bound + (1.01 if precision is SINGLE else 2.02) * precision.unit * peak)
    if target == "float16":
        # Smaller ones are subnormal, with other middles.
        near |= np.abs(values, out=distance) < 2.0**-14
    found: Array = np.flatnonzero(near)
    if len(found) > near.size * _FEW:
        return None
    if target == "bfloat16" and precision is SINGLE:
        bits += unit(1 << (dropped - 1))
        bits >>= unit(dropped)
        out[...] = bits
    elif target == "bfloat16":
        out[...] = cast(values)[0]
    else:
        out.view(target)[...] = values
    return found
