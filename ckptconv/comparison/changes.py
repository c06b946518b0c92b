"""What differs between two tensors: how many elements, and by how much. Computed block by block; pure.

What counts as different:

- Elements of one dtype are compared by their bits: 0.0 and −0.0 differ, and so do two NaNs of other bits.
- Elements of two dtypes are compared by value, both widened without rounding: floats to float64, integers to 64 bits. A
  NaN equals a NaN then, and 0.0 equals −0.0. Dtypes for which no such dtype exists (int64 and float32; a complex and a
  real one; quantized ones) are not compared any further.
- With a tolerance, elements are compared by value, whatever their dtypes. a and b are equal if both are NaN, if they
  are the same number, or if |b − a| <= max(rtol · max(|a|, |b|), atol), as in Python's `math.isclose`. By the rule
  "numpy" it is |b − a| <= atol + rtol · |b|, as in `numpy.isclose(a, b, equal_nan=True)`.

Sizes of changes: `max_abs` is the largest |b − a|; `max_rel` is the largest |b − a| / max(|a|, |b|), from 0 to 2. The
norms are roots of sums of squares over all elements that are finite on both sides. Those of complex numbers use their
absolute values. Differences of integers are exact; others are computed in float64. Blocks are added as rational
numbers without rounding: their order does not matter.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.tensors import kernels
from ckptconv.tensors.compare import differing
from ckptconv.tensors.dtypes import DTYPES, DType, can_cast
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.statistics import HALVES, root, sum_of_squares

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Elements to measure at a time: as float64 they stay in the second-level cache.
_BLOCK = 1 << 16
# A sum of squares from here on does not feel those that float32 rounds to less than its least normal number.
_LEAST = 2.0**-50
# If more than this share of them differs, all are measured.
_MANY = 1 / 4


class Tolerance(NamedTuple):
    """How far apart two values may be; see above."""

    rtol: float
    atol: float
    rule: str = "symmetric"

    def allowed(self, a: Array, b: Array) -> Array:
        """Return by how much finite numbers of shape (elements, halves) may differ."""
        np = numpy_module()
        if self.rule == "numpy":
            return self.atol + self.rtol * _absolute(b)
        allowed: Array = np.maximum(self.rtol * np.maximum(_absolute(a), _absolute(b)), self.atol)
        return allowed


@dataclass(frozen=True, slots=True)
class Change:
    """What differs between two tensors A and B, as the module says."""

    elements: int
    """How many elements differ."""

    same_value: int
    """How many of these have the same value in other bits: 0.0 and −0.0, or two NaNs."""

    not_finite: int
    """In how many of these either is NaN or infinite; these are in no size of change."""

    first: list[int] | None
    """The index of the first element that differs, one number for each dimension; null if none does."""

    first_a: str
    """Its value in A, with its bits."""

    first_b: str
    """Its value in B, with its bits."""

    max_abs: float | None
    """The largest difference of two finite elements; null if the elements are no numbers."""

    max_rel: float | None
    """The largest difference divided by the larger of both absolute values."""

    norm: float | None
    """The norm of the difference: the root of the sum of the squares of all its elements."""

    norm_a: float | None
    """The norm of A."""

    norm_b: float | None
    """The norm of B."""

    @property
    def relative(self) -> float | None:
        """The norm of the difference divided by the larger of both norms; null if an element that differs is NaN or
        infinite."""
        if self.not_finite or self.norm is None or self.norm_a is None or self.norm_b is None:
            return None
        return self.norm / (max(self.norm_a, self.norm_b) or 1.0)


class Squares(NamedTuple):
    """Sums of squares: of the differences, of A, and of B."""

    change: Fraction = Fraction(0)
    a: Fraction = Fraction(0)
    b: Fraction = Fraction(0)

    def plus(self, other: Squares) -> Squares:
        """Return the sums of both."""
        return Squares(self.change + other.change, self.a + other.a, self.b + other.b)


@dataclass(slots=True)
class Measured:
    """What was found in the elements met so far; of those of a block, `first` counts from the block's first."""

    elements: int = 0
    same_value: int = 0
    not_finite: int = 0
    first: int | None = None
    max_abs: float = 0
    max_rel: float = 0.0
    squares: Squares = field(default_factory=Squares)

    def add(self, other: Measured) -> None:
        """Add what was found in other elements, except which is the first."""
        self.elements += other.elements
        self.same_value += other.same_value
        self.not_finite += other.not_finite
        self.max_abs = max(self.max_abs, other.max_abs)
        self.max_rel = max(self.max_rel, other.max_rel)
        self.squares = self.squares.plus(other.squares)

    def change(self, place: list[int] | None, values: tuple[str, str], numbers: bool) -> Change:
        """Return it as a `Change`; `place` and `values` are those of the first element. `numbers`: all elements are."""
        counts = self.elements, self.same_value, self.not_finite, place, *values
        if not numbers:
            return Change(*counts, None, None, None, None, None)
        norms = (root(each) for each in self.squares)
        return Change(*counts, self.max_abs, self.max_rel, *norms)


def widened(one: DType, other: DType) -> str:
    """Return numpy's dtype that holds the numbers of both dtypes exactly: f8, i8 or u8; "" if there is none."""
    kinds = {one.kind, other.kind}
    floats = [_is_float(each) for each in (one, other)]
    if "c" in kinds:
        return "f8" if kinds == {"c"} else ""
    if not all(is_float or each.kind in "biu" for is_float, each in zip(floats, (one, other), strict=True)):
        return ""
    large = [each for each, is_float in zip((one, other), floats, strict=True) if not is_float and each.itemsize == 8]
    if any(floats):
        return "" if large else "f8"
    if any(each.name == "uint64" for each in large):
        return "" if "i" in kinds else "u8"
    return "i8"


def _is_float(dtype: DType) -> bool:
    return dtype.kind == "f" or can_cast(dtype.name, "float32")


def compared(
    one: memoryview, other: memoryview, dtypes: tuple[DType, DType], tolerance: Tolerance | None = None
) -> Measured:
    """Compare the bytes of as many elements of two dtypes.

    Raise ValueError if the dtypes differ and are not comparable (`widened`).
    """
    before, after = dtypes
    code = widened(before, after)
    if not code and before != after:
        raise ValueError(f"{before} and {after} are not comparable")
    found = Measured()
    count = len(one) // before.itemsize
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        a = one[start * before.itemsize : stop * before.itemsize]
        b = other[start * after.itemsize : stop * after.itemsize]
        if before == after:
            piece = _compared_bits(a, b, before, code, tolerance)
        else:
            piece = _measured(_numbers(a, before, code), _numbers(b, after, code), tolerance)
        if piece.first is not None and found.first is None:
            found.first = start + piece.first
        found.add(piece)
    return found


def squares_of(data: memoryview, dtype: DType) -> Fraction:
    """Return the sum of the squares of the finite elements in `data`; 0 if they are no numbers."""
    code, total = widened(dtype, dtype), Fraction(0)
    step = _BLOCK * dtype.itemsize
    for start in range(0, len(data) if code else 0, step):
        total += _squares(data[start : start + step], dtype, code)
    return total


def _squares(data: memoryview, dtype: DType, code: str, without: Array | None = None) -> Fraction:
    """Return the sum of the squares of the finite elements in `data`, but for those at the places `without`."""
    np = numpy_module()
    if dtype.name in ("bfloat16", "float16"):
        # float32 holds each square exactly, unless it is too large or too small for it.
        if dtype.name == "float16":
            values: Array = np.frombuffer(data, "<f2").astype("f4")
        else:
            values = np.left_shift(np.frombuffer(data, "<u2"), 16, dtype="u4").view("f4")
        if without is not None:
            values[without] = 0
        with np.errstate(all="ignore"):
            total = float(np.square(values, out=values).sum(dtype="f8"))
        if _LEAST <= total < math.inf:
            return Fraction(total)
    numbers = _numbers(data, dtype, code)
    if without is not None:
        numbers[without] = 0
    return _finite_squares(numbers)


def _compared_bits(
    one: memoryview, other: memoryview, dtype: DType, code: str, tolerance: Tolerance | None
) -> Measured:
    """Return what differs between elements of one dtype. If few bits differ, only those are measured on both sides."""
    np = numpy_module()
    unequal = differing(one, other, dtype.itemsize)
    count = int(np.count_nonzero(unequal))
    if not code:
        return Measured(count, first=int(unequal.argmax()) if count else None)
    if count > len(unequal) * _MANY and tolerance is None and code == "f8" and dtype.kind != "c":
        a, b = (_numbers(each, dtype, code)[:, 0] for each in (one, other))
        measured = _finite_changes(a, b, unequal, count)
        if measured is not None:
            return measured
    found, places = Measured(), None
    if count:
        (places,) = np.nonzero(unequal)
        a, b = (
            _numbers(memoryview(np.frombuffer(each, f"V{dtype.itemsize}")[places].view("u1")), dtype, code)
            for each in (one, other)
        )
        found = _measured(a, b, tolerance, bitwise=True)
        if found.first is not None:
            found.first = int(places[found.first])
    squares = _squares(one, dtype, code, places)
    found.squares = found.squares.plus(Squares(a=squares, b=squares))
    return found


def _finite_changes(a: Array, b: Array, unequal: Array, count: int) -> Measured | None:
    """Return what differs between float64 numbers, of which the bits of `count` are `unequal`, in few passes.

    Return None if some are not finite, or differ by more than a float64 holds; else they lose their signs.
    """
    np = numpy_module()
    with np.errstate(all="ignore"):
        distance = np.subtract(b, a)
        np.abs(distance, out=distance)
        largest = float(distance.max())
        if not largest < math.inf:
            return None
        squares = Squares(*(sum_of_squares(each) for each in (distance, a, b)))
        larger = np.maximum(np.abs(a, out=a), np.abs(b, out=b), out=a)
        if not larger.min():
            larger[larger == 0] = 1
        same_value = 0 if distance.min() else count - int(np.count_nonzero(distance))
        relative = float(np.divide(distance, larger, out=distance).max())
    return Measured(count, same_value, 0, int(unequal.argmax()), largest, relative, squares)


def _measured(a: Array, b: Array, tolerance: Tolerance | None, bitwise: bool = False) -> Measured:
    """Return what differs between numbers of shape (elements, halves). `bitwise`: the bits of all are known to."""
    np = numpy_module()
    with np.errstate(all="ignore"):
        equal = ((a == b) | (np.isnan(a) & np.isnan(b))).all(axis=1)
        finite = (np.isfinite(a) & np.isfinite(b)).all(axis=1)
        whole = bool(finite.all())
        x, y = (a, b) if whole else (a[finite], b[finite])
        distance, relative = _distances(x, y)
        unequal = ~equal
        if tolerance is not None:
            unequal[finite] &= distance.astype("f8") > tolerance.allowed(x, y)
        elif bitwise:
            unequal[:] = True
    found = Measured(int(unequal.sum()))
    found.first = int(unequal.argmax()) if found.elements else None
    found.same_value = int((unequal & equal).sum())
    found.not_finite = 0 if whole else int((unequal & ~finite).sum())
    if len(distance):
        found.max_abs = distance.max().item()
        found.max_rel = float(relative.max())
        found.squares = Squares(*(sum_of_squares(each.astype("f8", copy=False)) for each in (distance, x, y)))
    return found


def _distances(a: Array, b: Array) -> tuple[Array, Array]:
    """Return |b − a| of finite numbers, exact for integers, and that divided by max(|a|, |b|)."""
    np = numpy_module()
    largest = np.maximum(_absolute(a), _absolute(b))
    if a.dtype.kind != "f":
        first, second = a[:, 0], b[:, 0]
        # Modulo 2^64, which is exact: the distance of two 64-bit integers fits 64 bits without a sign.
        low, high = np.minimum(first, second).astype("u8"), np.maximum(first, second).astype("u8")
        distance = high - low
        return distance, _shares(distance.astype("f8"), largest)
    distance = _absolute(b - a)
    relative = _shares(distance, largest)
    over = ~np.isfinite(distance)
    if over.any():
        # The difference is larger than any float64, and its half is not.
        relative[over] = 2 * _shares(_absolute(b[over] / 2 - a[over] / 2), largest[over])
        distance[over] = sys.float_info.max
    return distance, relative


def _shares(sizes: Array, largest: Array) -> Array:
    """Return `sizes` / `largest`; 0 where that is 0."""
    np = numpy_module()
    shares: Array = np.divide(sizes, largest, out=np.zeros(len(sizes)), where=largest > 0)
    return shares


def _absolute(numbers: Array) -> Array:
    """Return the absolute values as float64, of numbers of shape (elements, halves)."""
    np = numpy_module()
    halves = np.abs(numbers.astype("f8", copy=False))
    result: Array = halves[:, 0] if halves.shape[1] == 1 else np.hypot(halves[:, 0], halves[:, 1])
    return result


def _numbers(data: memoryview, dtype: DType, code: str) -> Array:
    """Return elements as numbers of numpy's dtype `code`, of shape (elements, 1); complex ones as (elements, 2)."""
    np = numpy_module()
    if dtype.kind in "biu":
        stored = np.frombuffer(data, "<u1" if dtype.kind == "b" else f"<{dtype.kind}{dtype.itemsize}")
        numbers: Array = (stored != 0 if dtype.kind == "b" else stored).astype(code)[:, None]
        return numbers
    name = HALVES.get(dtype.name, dtype.name)
    if name in ("float64", "float32", "float16"):
        values = np.frombuffer(data, f"<f{DTYPES[name].itemsize}")
    else:
        values = np.frombuffer(kernels.apply((Cast(name, "float32"),), data)[0], "<f4")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        halves: Array = values.astype(code).reshape(-1, 2 if dtype.kind == "c" else 1)
    return halves


def _finite_squares(numbers: Array) -> Fraction:
    """Return the sum of the squares of those elements that are finite, of shape (elements, halves)."""
    np = numpy_module()
    values = numbers.astype("f8", copy=False)
    try:
        return sum_of_squares(values)
    except ValueError:
        return sum_of_squares(values[np.isfinite(values).all(axis=1)])
