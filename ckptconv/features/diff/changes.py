"""The differences between two tensors: how many elements, and by how much. Computed block by block; pure.

These elements count as different:

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.features.pairs.elements import differing
from ckptconv.features.reporting.statistics import HALVES, root, sum_of_squares
from ckptconv.tensors import kernels
from ckptconv.tensors.dtypes import DTYPES, DType, can_cast
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.moves import Cast

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Elements to measure at a time. As float64 they stay in the second-level cache.
BLOCK = 1 << 14
# If no more than this share of a block differs, only these elements are measured; the squares of the others are added
# up.
_MANY = 1 / 4


class Tolerance(NamedTuple):
    """The largest distance of two values that counts as equal; see above."""

    rtol: float
    atol: float
    rule: str = "symmetric"

    def allowed(self, a: Array, b: Array) -> Array:
        """Return the allowed differences of finite numbers of shape (elements, halves)."""
        np = numpy_module()
        if self.rule == "numpy":
            return self.atol + self.rtol * _absolute(b)
        allowed: Array = np.maximum(self.rtol * np.maximum(_absolute(a), _absolute(b)), self.atol)
        return allowed


@dataclass(frozen=True, slots=True)
class Change:
    """The differences between two tensors A and B, as the module says."""

    elements: int
    """Number of elements that differ."""

    same_value: int
    """Number of these that have the same value in other bits: 0.0 and −0.0, or two NaNs."""

    not_finite: int
    """Number of these with NaN or infinity on either side; no measure of the change includes them."""

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

    def plus(self, more: Squares) -> Squares:
        """Return the sums of both."""
        if not any(more) or not any(self):
            return self if any(self) else more
        return Squares(self.change + more.change, self.a + more.a, self.b + more.b)


@dataclass(slots=True)
class Measured:
    """The measurement of the elements so far. In a block, `first` counts from the block's first element."""

    elements: int = 0
    same_value: int = 0
    not_finite: int = 0
    first: int | None = None
    max_abs: float = 0
    max_rel: float = 0.0
    squares: Squares = field(default_factory=Squares)

    def add(self, more: Measured) -> None:
        """Add the measurement of other elements, except the index of the first."""
        self.elements += more.elements
        self.same_value += more.same_value
        self.not_finite += more.not_finite
        self.max_abs = max(self.max_abs, more.max_abs)
        self.max_rel = max(self.max_rel, more.max_rel)
        self.squares = self.squares.plus(more.squares)

    def add_behind(self, start: int, more: Measured) -> None:
        """Add the measurement of a block that begins with element `start`."""
        if more.first is not None and self.first is None:
            self.first = start + more.first
        self.add(more)

    def change(self, place: list[int] | None, values: tuple[str, str], numbers: bool) -> Change:
        """Return it as a `Change`; `place` and `values` are the first element's. `numbers`: all are numbers."""
        counts = self.elements, self.same_value, self.not_finite, place, *values
        if not numbers:
            return Change(*counts, None, None, None, None, None)
        norms = (root(squares) for squares in self.squares)
        return Change(*counts, self.max_abs, self.max_rel, *norms)


def widened(a: DType, b: DType) -> str:
    """Return the numpy dtype that holds the numbers of both dtypes exactly: f8, i8 or u8; "" if there is none."""
    kinds = {a.kind, b.kind}
    floats = [_is_float(dtype) for dtype in (a, b)]
    if "c" in kinds:
        return "f8" if kinds == {"c"} else ""
    if not all(is_float or dtype.kind in "biu" for is_float, dtype in zip(floats, (a, b), strict=True)):
        return ""
    large = [dtype for dtype, is_float in zip((a, b), floats, strict=True) if not is_float and dtype.itemsize == 8]
    if any(floats):
        return "" if large else "f8"
    if any(dtype.name == "uint64" for dtype in large):
        return "" if "i" in kinds else "u8"
    return "i8"


def _is_float(dtype: DType) -> bool:
    return dtype.kind == "f" or can_cast(dtype.name, "float32")


def compared(
    a: memoryview,
    b: memoryview,
    dtypes: tuple[DType, DType],
    tolerance: Tolerance | None = None,
) -> Measured:
    """Compare the bytes of equally many elements of two dtypes. Raise ValueError if the dtypes differ and are not
    comparable (`widened`)."""
    before, after = dtypes
    code = widened(before, after)
    if not code and before != after:
        raise ValueError(f"{before} and {after} are not comparable")
    total = Measured()
    with numpy_module().errstate(all="ignore"):
        for (start, block), (_, changed) in zip(_blocks(a, before), _blocks(b, after), strict=True):
            total.add_behind(start, _of_block(block, changed, dtypes, code, tolerance))
    return total


def squares_of(data: memoryview, dtype: DType) -> Fraction:
    """Return the sum of the squares of the finite elements in `data`; 0 if they are no numbers."""
    code = widened(dtype, dtype)
    with numpy_module().errstate(all="ignore"):
        blocks = (block for _, block in _blocks(data, dtype)) if code else ()
        return sum((_finite_squares(_numbers(block, dtype, code)) for block in blocks), Fraction(0))


def _blocks(data: memoryview, dtype: DType) -> Iterator[tuple[int, memoryview]]:
    """Yield `data` in pieces of equally many elements, each with the number of its first element."""
    for start in range(0, len(data) // dtype.itemsize, BLOCK):
        yield start, data[start * dtype.itemsize : (start + BLOCK) * dtype.itemsize]


def _of_block(
    bytes_a: memoryview, bytes_b: memoryview, dtypes: tuple[DType, DType], code: str, tolerance: Tolerance | None
) -> Measured:
    """Return the differences in a block, as numbers of numpy's dtype `code`; "" if they are no numbers."""
    np = numpy_module()
    before, after = dtypes
    if before != after:
        return _measured(_numbers(bytes_a, before, code), _numbers(bytes_b, after, code), None, tolerance)
    unequal = differing(bytes_a, bytes_b, before.itemsize)
    (places,) = unequal.nonzero()
    if not code:
        return Measured(len(places), first=int(places[0]) if len(places) else None)
    a, measured = _numbers(bytes_a, before, code), Measured()
    if len(places) > len(a) * _MANY:
        return _measured(a, _numbers(bytes_b, after, code), unequal, tolerance)
    if len(places):
        changed = np.frombuffer(bytes_b, f"V{after.itemsize}")[places].view("u1").data
        measured = _measured(a[places], _numbers(changed, after, code), unequal[places], tolerance)
        measured.first = None if measured.first is None else int(places[measured.first])
        a = a.copy()
        a[places] = 0
    squares = _finite_squares(a)
    measured.squares = measured.squares.plus(Squares(a=squares, b=squares))
    return measured


def _measured(a: Array, b: Array, unequal: Array | None, tolerance: Tolerance | None) -> Measured:
    """Return the differences of numbers of shape (elements, halves). `unequal`: which of them have different bits; None
    if they are compared by value."""
    np = numpy_module()
    distance, relative = _distances(a, b)
    largest = distance.max().item()
    same_value = distance == 0
    not_finite = 0
    finite: Any = slice(None)
    if not math.isfinite(largest):
        finite = (np.isfinite(a) & np.isfinite(b)).all(axis=1)
        same_value = ((a == b) | (np.isnan(a) & np.isnan(b))).all(axis=1)
        a, b = a[finite], b[finite]
        distance, relative = _distances(a, b)
        largest = distance.max().item() if len(distance) else 0.0
    if tolerance is not None or unequal is None:
        unequal = ~same_value
    if tolerance is not None:
        unequal[finite] &= distance.astype("f8", copy=False) > tolerance.allowed(a, b)
    if len(distance) < len(unequal):
        not_finite = int(np.count_nonzero(unequal & ~finite))
    measured = Measured(int(np.count_nonzero(unequal)), int(np.count_nonzero(unequal & same_value)), not_finite)
    measured.first = int(unequal.argmax()) if measured.elements else None
    if len(distance):
        measured.max_abs, measured.max_rel = largest, float(relative.max())
        numbers = (side.astype("f8", copy=False) for side in (distance, a, b))
        measured.squares = Squares(*map(sum_of_squares, numbers))
    return measured


def _distances(a: Array, b: Array) -> tuple[Array, Array]:
    """Return |b − a|, exact for integers, and its quotient by max(|a|, |b|); finite for finite numbers."""
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
    if len(distance) and distance.max() == math.inf:
        # The difference of two finite numbers may be larger than any float64; its half is not.
        over = np.isinf(distance) & np.isfinite(largest)
        relative[over] = 2 * _shares(_absolute(b[over] / 2 - a[over] / 2), largest[over])
        distance[over] = sys.float_info.max
    return distance, relative


def _shares(sizes: Array, largest: Array) -> Array:
    """Return `sizes` / `largest`; 0 if both are 0."""
    np = numpy_module()
    shares: Array = sizes / np.where(largest == 0, 1.0, largest)
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
    half = HALVES.get(dtype.name, dtype.name)
    if half not in ("float64", "float32", "float16"):
        data, half = kernels.apply((Cast(half, "float32"),), data)[0], "float32"
    values = np.frombuffer(data, f"<f{DTYPES[half].itemsize}")
    halves: Array = values.astype(code, copy=False).reshape(-1, 2 if dtype.kind == "c" else 1)
    return halves


def value(dtype: DType, bits: bytes) -> float:
    """Return the value of one element of a floating dtype."""
    with numpy_module().errstate(invalid="ignore"):  # signalling NaNs
        return float(_numbers(memoryview(bits), dtype, "f8")[0, 0])


def _finite_squares(numbers: Array) -> Fraction:
    """Return the sum of the squares of the finite elements, of shape (elements, halves)."""
    np = numpy_module()
    values = numbers.astype("f8", copy=False)
    try:
        return sum_of_squares(values)
    except ValueError:
        return sum_of_squares(values[np.isfinite(values).all(axis=1)])
