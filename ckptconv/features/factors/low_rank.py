"""The kernels `LowRank` and `Magnitude`: products of the factors of adapters, and rows with new lengths.

A product is the sum, in float64 and in the order of the rank, of products of two numbers. Adding in that order is slow.
A BLAS adds in any order, so that the last bits of its result differ from machine to machine; but its distance from the
sum in order is bounded. If all numbers within the bound round to one number of the wanted dtype, that number is the
result. The few elements near the middle between two such numbers are added up in order.

Source of the bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1. A sum of n
products in any order, with fused operations or without, is off by at most nu / (1 - nu) times the sum of the magnitudes
of the products, which by Cauchy and Schwarz is at most the product of the lengths of the two vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.features.factors.rounding import (
    DOUBLE,
    SINGLE,
    Casting,
    Precision,
    numbers_as,
    precision_for,
    round_certain,
)
from ckptconv.process import go_on
from ckptconv.tensors.computing import Box
from ckptconv.tensors.float_formats import loaded, numbers, numpy_module, scratch

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

# For factors of a larger rank than this, fewer bytes are held at a time: they are multiplied in float64.
DEEP = 1 << 10
# Elements that are added up in order at a time. With the sum, they stay in the first-level cache.
_IN_ORDER = 1 << 11
# Bytes of a block that a BLAS computes. With the base and the numbers to compare, they stay in the second-level cache.
# A block has this many columns, if there are so many.
BLOCK, WIDE = 1 << 18, 1 << 10
# Products of numbers in one call of a BLAS with threads. OpenBLAS computes so many in the calling thread. For more, it
# wakes other threads, and the threads that convert would wait for those.
_AT_ONCE = 1 << 18
# Elements of a row whose squares are added up at a time.
_IN_ROW = 1 << 16
# Factors of elements that are added up one by one, at a time.
PICKED = 1 << 15


class _Stored(NamedTuple):
    """Numbers of a floating dtype, by their bits."""

    dtype: str
    bits: Array

    def at(self, place: Any) -> _Stored:
        return _Stored(self.dtype, self.bits[place])

    def numbers(self, code: str) -> Array:
        """Return them in numpy's dtype `code`, which can hold them."""
        return numbers_as(code, *self)


class _Sum(NamedTuple):
    """`base`, plus the product of two factors times `scale`."""

    base: _Stored
    left: _Stored
    right: _Stored
    scale: float

    @classmethod
    def of(cls, scale: float, boxes: Sequence[Box], arrays: Sequence[Array]) -> _Sum:
        base, left, right, *times = (_Stored(box.dtype, bits) for box, bits in zip(boxes, arrays, strict=True))
        if times:
            with numpy_module().errstate(all="ignore"):
                right = _Stored("float64", (right.numbers("f8") * times[0].numbers("f8")).view("u8"))
        # The factors give the tile, or its transpose.
        if boxes[1].axes[0].dim:
            left, right = _Stored(right.dtype, right.bits.T), _Stored(left.dtype, left.bits.T)
        return cls(base, left, right, scale)

    def at(self, place: tuple[slice, slice]) -> _Sum:
        """Return a block of it."""
        rows, columns = place
        return self._replace(base=self.base.at(place), left=self.left.at(rows), right=self.right.at((..., columns)))


# ------------------------------------------------------------------------------------------------------------ in order


def added(scale: float, boxes: Sequence[Box], arrays: Sequence[Array], out: Array) -> None:
    """Fill `out`, of float64, with the base plus the product of the factors."""
    add_all(_Sum.of(scale, boxes, arrays), out)


def add_all(sums: _Sum, out: Array) -> None:
    """Fill `out`, of float64, with the sum."""
    np = numpy_module()
    with np.errstate(all="ignore"):
        for place in _blocks(out.shape, _IN_ORDER, _IN_ORDER):
            into = out[place]
            go_on()
            base, left, right = (part.numbers("f8") for part in sums.at(place)[:3])
            total, product = np.zeros(into.shape), np.empty(into.shape)
            for column, row in zip(left.T, right, strict=True):
                np.multiply(column[:, None], row, out=product)
                total += product
            total *= sums.scale
            np.add(base, total, out=into)
        _one_nan(out)


def add_some(sums: _Sum, rows: Array, columns: Array) -> Array:
    """Return the sums at some rows and columns, none of which are NaN."""
    np = numpy_module()
    total: Array = np.zeros(len(rows))
    left, right = (
        _Stored(part.dtype, bits.take(at, 1)).numbers("f8")
        for part, bits, at in ((sums.left, sums.left.bits.T, rows), (sums.right, sums.right.bits, columns))
    )
    for products in np.multiply(left, right, out=left):
        total += products
    total *= sums.scale
    total += sums.base.at((rows, columns)).numbers("f8")
    return total


def _blocks(shape: tuple[int, ...], most: int, wide: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of at most `most` elements, and at most `wide` columns, that cover a matrix, column by column."""
    width = min(max(shape[1], 1), wide)
    height = max(most // width, 1)
    for at in range(0, shape[1], width):
        for top in range(0, shape[0], height):
            yield slice(top, min(top + height, shape[0])), slice(at, min(at + width, shape[1]))


def _one_nan(out: Array) -> None:
    """Replace every NaN by the same one: arithmetic gives one that depends on the processor."""
    np = numpy_module()
    if math.isnan(out.sum()):
        out[np.isnan(out)] = np.nan


# ------------------------------------------------------------------------------------------------------------- rounded


def rounded(scale: float, boxes: Sequence[Box], arrays: Sequence[Array], target: str, out: Array, cast: Casting) -> int:
    """Fill `out` with the result of `added`, rounded to the dtype `target`. Return the number of finite numbers that
    became infinite."""
    np = numpy_module()
    sums = _Sum.of(scale, boxes, arrays)
    overflows, rank = 0, sums.right.bits.shape[0]
    near = [(np.empty(0, "i8"),) * 2]
    first = precision_for(target, {part.dtype for part in sums[:3]}, (sums.scale,)) if rank <= DEEP else DOUBLE
    known: dict[tuple[str, int], Products] = {}
    with np.errstate(all="ignore"):
        for place in _blocks(out.shape, BLOCK // int(first.code[1]), WIDE):
            # A number that is too uncertain in float32 may be certain in float64.
            for precision in dict.fromkeys((first, DOUBLE)):
                key = precision.dtype, place[1].start
                if key not in known:
                    known = {
                        known_key: products for known_key, products in known.items() if known_key[1] == place[1].start
                    }
                    known[key] = Products.of(sums.at((slice(None), place[1])), precision, target)
                uncertain = known[key].round(place[0], out[place], cast)
                if uncertain is not None:
                    near.append((uncertain[0] + place[0].start, uncertain[1] + place[1].start))
                    break
            else:
                whole = np.empty(out[place].shape)
                add_all(sums.at(place), whole)
                out[place], count = cast(whole)
                overflows += count
        rows, columns = map(np.concatenate, zip(*near, strict=True))
        most = max(PICKED // max(rank, 1), 1)
        for at in range(0, len(rows), most):
            go_on()
            at_once = rows[at : at + most], columns[at : at + most]
            out[at_once], count = cast(add_some(sums, *at_once))
            overflows += count
    return overflows


class _Vectors(NamedTuple):
    """The rows of a matrix, and their lengths."""

    numbers: Array
    lengths: Array

    @classmethod
    def of(cls, rows: Array) -> _Vectors:
        np = numpy_module()
        # Squares that underflow count as if they were just below the smallest that does not.
        return cls(rows, np.sqrt(np.einsum("ik,ik->i", rows, rows) + rows.shape[1] * 2.0**-126))


class Products(NamedTuple):
    """Sums with a BLAS's products of `left` and `right`, and how far they may be from those in order."""

    base: _Stored
    left: _Vectors
    right: _Vectors
    precision: Precision
    target: str

    @classmethod
    def of(cls, sums: _Sum, precision: Precision, target: str) -> Products:
        """Return the products for sums, in `precision`."""
        left = sums.left.numbers(precision.code) * numpy_module().array(sums.scale, precision.code)
        right = sums.right.numbers(precision.code).T
        return cls(sums.base, _Vectors.of(left), _Vectors.of(right), precision, target)

    def round(self, rows: slice, out: Array, cast: Casting) -> tuple[Array, Array] | None:
        """Fill `out` with the bits of the sums in `rows`. Return the rows and columns in it of sums that may round to
        another number, or None, as `round_certain` does."""
        np = numpy_module()
        code = self.precision.code
        values, room = (
            scratch(use, out.size * int(code[1])).view(code).reshape(out.shape) for use in ("sums", "other")
        )
        multiply(self.left.numbers[rows], self.right.numbers.T, values)
        base = self.base.at(rows)
        is_plain = base.dtype == "bfloat16" and self.precision is SINGLE
        values += numbers(*base, room.view("u4")) if is_plain else base.numbers(code)
        near = round_certain(values, self._bounds(rows), self.precision, self.target, out, room, cast)
        return None if near is None else np.divmod(near, out.shape[1])

    def _bounds(self, rows: slice) -> Array:
        """Return a column: for each of `rows`, how far its products may be from those that are added up in order."""
        rank, left, right = self.left.numbers.shape[1], self.left.lengths[rows][:, None], self.right.lengths.max()
        # Sums in order are as far off; in float32, only the others count. The scale is rounded, and so is what it
        # multiplies. The last term is for underflow.
        errors = 1.01 * self.precision.unit * (rank + 4) * (1 if self.precision is SINGLE else 2)
        bounds: Array = errors * left * right + (rank + 2) * 2.0**-126 * (1 + left + right)
        return bounds


def multiply(left: Array, right: Array, out: Array) -> None:
    """Fill `out` with the product of two matrices."""
    _, blas_is_alone = loaded()  # then it takes no memory for threads, however much it is given
    side = max(out.shape) if blas_is_alone else max(math.isqrt(_AT_ONCE // max(len(right), 1)), 1)
    for rows, columns in _blocks(out.shape, side * side, side):
        numpy_module().matmul(left[rows], right[:, columns], out=out[rows, columns])


# ------------------------------------------------------------------------------------------------------------- lengths


def lengthened(boxes: Sequence[Box], arrays: Sequence[Array], starts: Sequence[int], out: Array) -> None:
    """Fill `out`, of float64, with the elements of rows that get new lengths."""
    np = numpy_module()
    rows, lengths = (_Stored(box.dtype, bits).numbers("f8") for box, bits in zip(boxes, arrays, strict=True))
    with np.errstate(all="ignore"):
        squares = np.zeros(len(rows))
        for at in range(0, rows.shape[1], _IN_ROW):
            some = rows[:, at : at + _IN_ROW] ** 2
            some[:, 0] += squares
            squares = np.add.accumulate(some, axis=1)[:, -1]
        factors = lengths / np.sqrt(squares)
        np.multiply(rows[:, starts[1] : starts[1] + out.shape[1]], factors[:, None], out=out)
        _one_nan(out)
