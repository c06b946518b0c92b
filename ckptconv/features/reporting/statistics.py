"""Statistics of a tensor's values, computed from its bytes piece by piece. Pure.

What each means:

- `nan` and `inf` count elements. A complex element with a NaN in either half counts as NaN, else with an infinity in
  either half as infinite. `zeros` counts elements equal to zero, of either sign; of bools, those that are false.
- `min`, `max`, `mean` and `std` are those of the finite elements, or None if there is none. `std` is the
  population's: the squares are divided by the number of elements, as numpy does it and unlike torch's default.
- Bools count as 0 and 1. Complex numbers have no order: no `min` and `max`; `mean` is [real, imaginary], and `std` is
  the root of the mean squared distance from it.
- A dtype whose bytes are not numbers by themselves, such as a quantized or packed one, has no statistics.

Counts, `min` and `max` are exact, and so is the sum of integers. Floats are summed in float64 in blocks, and squares
about the mean of their block. Blocks are added as rational numbers without rounding: their order does not matter.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ckptconv.tensors.dtypes import DTYPES, DType, can_cast
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import Convert, LazyTensor, View
from ckptconv.tensors.moves import Cast

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# Numbers to handle at a time: as float64 they stay in the second-level cache.
BLOCK = 1 << 16
# A float64 beyond this is scaled, so that its square is neither infinite nor zero.
_LARGE, _SMALL = 2.0**480, 2.0**-480
# The dtype of each half of a complex number.
HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one tensor, as the module says."""

    min: float | None
    """The least finite element; an exact integer for integers and bools; null for complex numbers, or if nothing is
    finite."""

    max: float | None
    """The greatest finite element, as `min`."""

    mean: float | list[float] | None
    """The mean of the finite elements; of complex numbers [real, imaginary]; bools are 0 and 1."""

    std: float | None
    """The standard deviation of the finite elements, divided by their number."""

    zeros: int
    """Number of zero elements; for bools, of false ones."""

    nan: int
    """Number of NaN elements."""

    inf: int
    """Number of infinite elements."""

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not self.nan and not self.inf


def numbers(tensor: LazyTensor) -> LazyTensor | None:
    """Return the tensor of bools, integers, float32 or float64 whose bytes a `Moments` takes for `tensor`.

    A complex tensor gets one more dimension, of its two halves. Return None if its elements are not numbers.
    """
    if tensor.dtype.name in HALVES:
        tensor = View(tensor, DTYPES[HALVES[tensor.dtype.name]], (*tensor.shape, 2))
    if tensor.dtype.name in ("float32", "float64") or tensor.dtype.kind in "biu":
        return tensor
    if not can_cast(tensor.dtype.name, "float32"):
        return None
    return Convert(tensor, Cast(tensor.dtype.name, "float32"), DTYPES["float32"])


@dataclass(slots=True)
class Moments:
    """Counts, extremes and power sums of the elements met so far.

    `count` are the finite elements, `seen` all. `sums` has the sum of the numbers, of each half if they are complex;
    `squares` is the sum of the squares.
    """

    seen: int = 0
    count: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    min: float | None = None
    max: float | None = None
    sums: tuple[Fraction, ...] = ()
    squares: Fraction = Fraction(0)

    def add(self, other: Moments) -> None:
        """Add the elements of `other`."""
        self.seen += other.seen
        self.count += other.count
        self.zeros += other.zeros
        self.nan += other.nan
        self.inf += other.inf
        if other.min is not None and other.max is not None:
            self.min = other.min if self.min is None else min(self.min, other.min)
            self.max = other.max if self.max is None else max(self.max, other.max)
        if other.count:
            mine = self.sums or (Fraction(0),) * len(other.sums)
            self.sums = tuple(total + more for total, more in zip(mine, other.sums, strict=True))
            self.squares += other.squares

    def statistics(self) -> Statistics:
        """Return the statistics of all elements that were added."""
        low, high, counts = self.min, self.max, (self.zeros, self.nan, self.inf)
        if not self.count:
            return Statistics(None, None, None, None, *counts)
        if low is not None and low == high:
            return Statistics(low, high, float(low), 0.0, *counts)
        means = [total / self.count for total in self.sums]
        variance = self.squares / self.count - sum(mean * mean for mean in means)
        mean = [float(component) for component in means]
        return Statistics(low, high, mean[0] if len(mean) == 1 else mean, root(variance), *counts)


def moments(dtype: DType, data: memoryview) -> Moments:
    """Return the moments of the elements in `data`, a piece of `numbers` of a tensor of `dtype`.

    Raise ValueError if `data` is not whole elements.
    """
    np = numpy_module()
    total = Moments()
    if dtype.kind in "biu":
        code = "<u1" if dtype.kind == "b" else f"<{dtype.kind}{dtype.itemsize}"
        values = np.frombuffer(data, code)
        for at in range(0, len(values), BLOCK):
            block = values[at : at + BLOCK]
            total.add(_of_integers(block != 0 if dtype.kind == "b" else block))
        return total
    halves = 2 if dtype.kind == "c" else 1
    values = np.frombuffer(data, "<f8" if dtype.name in ("float64", "complex128") else "<f4").reshape(-1, halves)
    scratch = np.empty(min(len(values) * halves, BLOCK), "f8")
    for at in range(0, len(values), BLOCK // halves):
        total.add(_of_floats(values[at : at + BLOCK // halves], scratch))
    return total


def _of_integers(block: Array) -> Moments:
    np = numpy_module()
    low, high = int(block.min()), int(block.max())
    # Distances from the least are exact in 64 bits, and so is the sum of 2^16 halves of them.
    distances = block.astype("u8") - np.uint64(low & (2**64 - 1))
    total = (int((distances >> np.uint64(32)).sum()) << 32) + int((distances & np.uint64(2**32 - 1)).sum())
    centre = float(total // len(block))
    spread = distances.astype("f8")
    spread -= centre
    spread *= spread  # np.dot would start the threads of a BLAS
    middle, total = low + int(centre), total + len(block) * low
    squares = Fraction(float(spread.sum())) + 2 * middle * total - len(block) * middle * middle
    zeros = len(block) - int(np.count_nonzero(block)) if low <= 0 <= high else 0
    return Moments(len(block), len(block), zeros, 0, 0, low, high, (Fraction(total),), squares)


def _of_floats(block: Array, scratch: Array) -> Moments:
    """Return the moments of a block of shape (elements, halves); `scratch` has room for it in float64."""
    np = numpy_module()
    moments = Moments(seen=len(block))
    low, high = float(block.min()), float(block.max())
    # Both are NaN if any number is.
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = np.isfinite(block).all(axis=1)
        moments.nan = int(np.isnan(block).any(axis=1).sum())
        block = block[finite]
        moments.inf = moments.seen - moments.nan - len(block)
        if not len(block):
            return moments
        low, high = float(block.min()), float(block.max())
    moments.count = len(block)
    if low <= 0 <= high:
        moments.zeros = int(np.count_nonzero((block == 0).all(axis=1) if block.shape[1] > 1 else block == 0))
    if block.shape[1] == 1:
        moments.min, moments.max = low + 0.0, high + 0.0  # not -0.0
    largest = max(-low, high)
    exponent = _exponent(largest)
    sums = []
    for half in block.T:
        values = scratch[: len(half)]
        values[...] = half
        if exponent:
            np.ldexp(values, -exponent, out=values)
        total = float(values.sum())
        centre = total / len(half)
        values -= centre
        exact, middle = Fraction(total), Fraction(centre)
        values *= values
        squares = Fraction(float(values.sum())) + middle * (2 * exact - len(half) * middle)
        if exponent:
            exact, squares = exact * Fraction(2) ** exponent, squares * Fraction(4) ** exponent
        sums.append(exact)
        moments.squares += squares
    moments.sums = tuple(sums)
    return moments


def root(value: Fraction) -> float:
    """Return the square root, also of a number too large or small for a float; 0 of one that rounding made negative. A
    root that is too large itself becomes the largest float."""
    if value <= 0:
        return 0.0
    half = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(value / Fraction(4) ** half), half)
    except OverflowError:
        return sys.float_info.max


def sum_of_squares(values: Array) -> Fraction:
    """Return the sum of the squares of float64 `values`. Raise ValueError if one of them is not finite."""
    np = numpy_module()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # signalling NaNs too
        total = float(np.square(values).sum())
    if _SMALL <= total < math.inf:
        return Fraction(total)
    largest = max(-float(values.min()), float(values.max())) if values.size else 0.0
    if not math.isfinite(largest):
        raise ValueError("the numbers whose squares are added must be finite")
    exponent = _exponent(largest)
    return Fraction(float(np.square(np.ldexp(values, -exponent)).sum())) * Fraction(4) ** exponent


def _exponent(largest: float) -> int:
    """Return the power of two by which numbers up to `largest` are divided, so that squares fit a float64."""
    return math.frexp(largest)[1] if largest > _LARGE or 0 < largest < _SMALL else 0
