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
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.tensors import kernels
from ckptconv.tensors.compare import differing
from ckptconv.tensors.dtypes import DTYPES, DType, can_cast
from ckptconv.tensors.float_formats import numpy_module, scratch
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.statistics import HALVES, root, sum_of_squares

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Elements to measure at a time, and their bytes, at most; and bytes that are compared at once to find those.
_BLOCK, _BYTES, _WORD = 1 << 17, 1 << 18, 8
# One word in so many is looked at first.
_FIRST = 16
# If more than this share of the words differs, all are measured.
_MANY = 1 / 4
# Numbers whose squares a BLAS adds up without threads of its own.
_ROW = 1 << 13
# Between these, sums of squares feel neither what is rounded to zero nor how many are added up.
_LEAST, _MOST = 2.0**-480, 2.0**1000
# If no more than this share of the numbers changes sign, only these are looked at for the largest share. Else, if one
# quotient is so near to −1, only those that are so many times further, and what is rounded.
_FEW, _NEAR, _FURTHER, _ROUNDED = 1 / 64, 1 / 4, 4 / 3, 2.0**-20


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
        if not any(other) or not any(self):
            return self if any(self) else other
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

    def add_behind(self, start: int, other: Measured) -> None:
        """Add what was found in a block of which element `start` is the first."""
        if other.first is not None and self.first is None:
            self.first = start + other.first
        self.add(other)

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


def _is_real(dtype: DType) -> bool:
    return _is_float(dtype) and dtype.kind != "c"


def compared(
    one: memoryview,
    other: memoryview,
    dtypes: tuple[DType, DType],
    tolerance: Tolerance | None = None,
) -> Measured:
    """Compare the bytes of as many elements of two dtypes. Raise ValueError if these differ and are not comparable
    (`widened`)."""
    before, after = dtypes
    code = widened(before, after)
    if not code and before != after:
        raise ValueError(f"{before} and {after} are not comparable")
    with numpy_module().errstate(all="ignore"):
        if before == after:
            return _compared_bits(one, other, before, tolerance)
        found = Measured()
        for (start, a), (_, b) in zip(_blocks(one, before), _blocks(other, after, before), strict=True):
            found.add_behind(start, _measured(_numbers(a, before, code), _numbers(b, after, code), tolerance))
        return found


def squares_of(data: memoryview, dtype: DType) -> Fraction:
    """Return the sum of the squares of the finite elements in `data`; 0 if they are no numbers."""
    with numpy_module().errstate(all="ignore"):
        total, others = _squares(data, dtype)
        return Fraction(total) + others


def _blocks(data: memoryview, dtype: DType, beside: DType | None = None) -> Iterator[tuple[int, memoryview]]:
    """Yield pieces of `data`, each behind the number of its first element; as many as of elements of `beside`."""
    count = min(_BLOCK, _BYTES // (beside or dtype).itemsize)
    for start in range(0, len(data) // dtype.itemsize, count):
        yield start, data[start * dtype.itemsize : (start + count) * dtype.itemsize]


def _squares(data: memoryview, dtype: DType, without: Array | None = None) -> tuple[float, Fraction]:
    """Return the sum of the squares of the finite elements in `data`, but for those at the places `without`, which
    ascend: of blocks where a float holds it, and of others."""
    np = numpy_module()
    code, total, others, done = widened(dtype, dtype), 0.0, Fraction(0), 0
    for start, block in _blocks(data, dtype) if code else ():
        numbers = _doubles(_mixed(block, dtype, "a"), "a") if _is_real(dtype) else _numbers(block, dtype, code)
        if without is not None:
            stop = int(np.searchsorted(without, start + len(numbers)))
            numbers[_in_mixed(without[done:stop] - start, dtype, len(numbers))] = 0
            done = stop
        squares = _sum_of_squares(numbers) if _is_real(dtype) else None
        if squares is None:
            others += _finite_squares(numbers.reshape(len(numbers), -1))
        else:
            total += squares
    return total, others


def _compared_bits(one: memoryview, other: memoryview, dtype: DType, tolerance: Tolerance | None) -> Measured:
    """Return what differs between elements of one dtype. If few bits differ, only those are measured on both sides."""
    places = _few_places(one, other, dtype.itemsize)
    if places is not None:
        return _measured_at(places, one, other, dtype, tolerance)
    found, sums = Measured(), [0.0, 0.0, 0.0]
    for (start, a), (_, b) in zip(_blocks(one, dtype), _blocks(other, dtype), strict=True):
        unequal = differing(a, b, dtype.itemsize)
        piece = _finite_changes(a, b, dtype, unequal, sums) if tolerance is None else None
        found.add_behind(start, piece or _measured_at(unequal.nonzero()[0], a, b, dtype, tolerance))
    found.squares = found.squares.plus(Squares(*map(Fraction, sums)))
    return found


def _few_places(one: memoryview, other: memoryview, itemsize: int) -> Array | None:
    """Return the numbers of the elements whose bits differ; None if they are many, of all or of the first."""
    np = numpy_module()
    whole, each = len(one) // _WORD, _WORD // itemsize
    if not each:
        return None
    a, b = (np.frombuffer(side, f"u{_WORD}", whole) for side in (one, other))
    for count in (whole // _FIRST, whole):
        unequal = a[:count] != b[:count]
        if np.count_nonzero(unequal) > count * _MANY:
            return None
    (words,) = unequal.nonzero()
    (inside,) = differing(a[words].data, b[words].data, itemsize).nonzero()
    (behind,) = differing(one[whole * _WORD :], other[whole * _WORD :], itemsize).nonzero()
    shift = each.bit_length() - 1
    places: Array = (words[inside >> shift] << shift) + (inside & each - 1)
    return np.concatenate([places, behind + whole * each]) if len(behind) else places


def _measured_at(
    places: Array, one: memoryview, other: memoryview, dtype: DType, tolerance: Tolerance | None
) -> Measured:
    """Return what differs between elements of one dtype, whose bits differ at `places` alone, which ascend."""
    np = numpy_module()
    code, sums = widened(dtype, dtype), [0.0, 0.0, 0.0]
    found = Measured()
    if not code:
        return Measured(len(places), first=int(places[0]) if len(places) else None)
    for at in range(0, len(places), _BLOCK):
        here = places[at : at + _BLOCK]
        a, b = (np.frombuffer(side, f"V{dtype.itemsize}")[here].view("u1").data for side in (one, other))
        piece = _finite_changes(a, b, dtype, np.ones(len(here), "?"), sums) if tolerance is None else None
        if piece is None:
            piece = _measured(_numbers(a, dtype, code), _numbers(b, dtype, code), tolerance, bitwise=True)
        if piece.first is not None:
            piece.first = int(here[piece.first])
        found.add_behind(0, piece)
    equal, others = _squares(one, dtype, places)
    sums = [sums[0], sums[1] + equal, sums[2] + equal]
    found.squares = found.squares.plus(Squares(*map(Fraction, sums))).plus(Squares(a=others, b=others))
    return found


def _finite_changes(
    one: memoryview, other: memoryview, dtype: DType, unequal: Array, sums: list[float]
) -> Measured | None:
    """Return what differs between real numbers, of which the bits of some are `unequal`, in few passes. The sums of
    squares are added to `sums`, in the order of `Squares`.

    Return None if they are no real numbers, some are not finite, or sums are too large or small.
    """
    if not _is_real(dtype):
        return None
    np = numpy_module()
    a, b = _mixed(one, dtype, "a"), _mixed(other, dtype, "b")
    x, y = _doubles(a, "a"), _doubles(b, "b")
    squares = [_sum_of_squares(each) for each in (x, y)]
    # Quotients tell any two apart that are not the same, as they have more than twice the bits of the numbers: those
    # of up to 11 bits in float32, of 24 bits in float64.
    quotients = None
    if dtype.itemsize < 8:
        of = (b, a) if dtype.itemsize < a.itemsize else (y, x)
        quotients = np.divide(*of, out=_room("quotients", len(a), of[0].dtype))
    max_rel, is_zero = _largest_share(x, y, quotients)
    change = np.subtract(y, x, out=y)
    max_abs = abs(max(-float(change[change.argmin()]), float(change[change.argmax()])))
    squares.insert(0, _sum_of_squares(change))
    if None in squares or not max_abs < math.inf:
        return None
    for index, square in enumerate(squares):
        sums[index] += square or 0
    count = int(np.count_nonzero(unequal))
    same_value = count - int(np.count_nonzero(change)) if is_zero else 0
    return Measured(count, same_value, 0, int(unequal.argmax()) if count else None, max_abs, max_rel)


def _largest_share(x: Array, y: Array, quotients: Array | None) -> tuple[float, bool]:
    """Return the largest of |y − x| / max(|x|, |y|), of finite numbers whose `quotients` y / x may be known, and may be
    changed; and whether x and y may both be 0 somewhere. What comes of numbers that are not finite has no meaning.

    Where all quotients are positive, the share falls up to 1 and rises from there: the least or the largest has it.
    Where one is negative, one of those has it.
    """
    np = numpy_module()
    if quotients is None:
        return _share_at(x, y, slice(None)), True
    least, most = int(quotients.argmin()), int(quotients.argmax())
    is_zero = math.isnan(quotients[most])
    if is_zero:
        np.copyto(quotients, 1, where=np.isnan(quotients))
        least, most = int(quotients.argmin()), int(quotients.argmax())
    if quotients[least] >= 0:
        ends = ((float(x[at]), float(y[at])) for at in (least, most))
        return max(abs(b - a) / (max(abs(a), abs(b)) or 1.0) for a, b in ends), is_zero
    negative = quotients < 0
    if np.count_nonzero(negative) <= len(quotients) * _FEW:
        return _share_at(x, y, negative.nonzero()[0]), is_zero
    # From −1, where it is 2, the share falls by d on one side and by d / (1 + d) on the other.
    distance = np.abs(np.add(quotients, 1, out=quotients), out=quotients)
    nearest = float(distance.min())
    near = (distance <= nearest * _FURTHER + _ROUNDED).nonzero()[0] if nearest <= _NEAR else slice(None)
    return _share_at(x, y, near), is_zero


def _share_at(x: Array, y: Array, at: Any) -> float:
    np = numpy_module()
    a, b = x[at], y[at]
    return float(_shares(np.abs(b - a), np.maximum(np.abs(a), np.abs(b))).max())


def _sum_of_squares(numbers: Array) -> float | None:
    """Return the sum of the squares of float64 `numbers`; None if that is too large or small for one, or not finite."""
    np = numpy_module()
    whole = len(numbers) // _ROW * _ROW
    rows, rest = numbers[:whole], numbers[whole:]
    # A BLAS adds so few with one thread.
    total = float(np.dot(rest, rest))
    if whole:
        total += float(np.add.reduce(np.matmul(rows.reshape(-1, 1, _ROW), rows.reshape(-1, _ROW, 1)), None))
    if _LEAST <= total <= _MOST:
        return total
    return None if total or numbers.any() else 0.0


def _floats(data: memoryview, dtype: DType, use: str) -> Array:
    """Return real numbers as float64 if they are, else as float32; perhaps in this thread's room for `use`, which must
    not be written to."""
    np = numpy_module()
    if dtype.name == "bfloat16":
        stored = np.frombuffer(data, "<u2")
        room = _room(f"single {use}", len(stored), np.dtype("u4"))
        room[...] = stored
        values: Array = np.left_shift(room, 16, out=room).view("f4")
        return values
    if dtype.name in ("float64", "float32", "float16"):
        values = np.frombuffer(data, f"<f{dtype.itemsize}")
        return values.astype("f4") if dtype.itemsize == 2 else values
    single: Array = np.frombuffer(kernels.apply((Cast(dtype.name, "float32"),), data)[0], "<f4")
    return single


def _mixed(data: memoryview, dtype: DType, use: str) -> Array:
    """Return real numbers as `_floats` does, in another order: `_in_mixed`. Two at a time are taken apart."""
    if not _is_paired(dtype, len(data) // dtype.itemsize):
        return _floats(data, dtype, use)
    np = numpy_module()
    pairs = np.frombuffer(data, "<u4")
    room = _room(f"single {use}", 2 * len(pairs), pairs.dtype)
    np.left_shift(pairs, 16, out=room[: len(pairs)])
    np.bitwise_and(pairs, 0xFFFF0000, out=room[len(pairs) :])
    values: Array = room.view("f4")
    return values


def _in_mixed(places: Array, dtype: DType, count: int) -> Array:
    """Return where `_mixed` puts the elements at `places`, of `count`."""
    return (places >> 1) + (places & 1) * (count >> 1) if _is_paired(dtype, count) else places


def _is_paired(dtype: DType, count: int) -> bool:
    return dtype.name == "bfloat16" and count % 2 == 0


def _doubles(numbers: Array, use: str) -> Array:
    """Return `numbers` as float64, in this thread's room for `use`."""
    room = _room(f"double {use}", len(numbers), numpy_module().dtype("f8"))
    room[...] = numbers
    return room


def _room(use: str, count: int, dtype: np.dtype[Any]) -> Array:
    """Return this thread's room for `count` numbers."""
    room: Array = scratch(f"compared {use}", count * dtype.itemsize).view(dtype)
    return room


def _measured(a: Array, b: Array, tolerance: Tolerance | None, bitwise: bool = False) -> Measured:
    """Return what differs between numbers of shape (elements, halves). `bitwise`: the bits of all are known to."""
    np = numpy_module()
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
    values = _floats(data, DTYPES[HALVES.get(dtype.name, dtype.name)], "numbers")
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
