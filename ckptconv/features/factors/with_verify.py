"""The bits that the kernels of merges give, by an arithmetic of their own, for verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.features.factors.kernels import LowRank, Magnitude
from ckptconv.features.verify.arithmetic import InputBox, values
from ckptconv.tensors.float_formats import numpy_module

if TYPE_CHECKING:
    from ckptconv.features.verify.arithmetic import Array


def _with_product(kernel: LowRank, parts: Sequence[InputBox], indices: Sequence[Array]) -> Array:
    """Return the bits of a base plus a product of factors: each number rounded to float64, in order."""
    np = numpy_module()
    base, left, right, *times = (values(part.dtype, part.bits) for part in parts)
    rows, columns = parts[1].place(indices)[0], parts[2].place(indices)[1]
    with np.errstate(all="ignore"):
        total = np.zeros([len(axis) for axis in indices])
        right = right * times[0] if times else right
        for inner in range(left.shape[1]):
            total = total + left[rows, inner] * right[inner, columns]
        total_plus_base = base[tuple(parts[0].place(indices))] + kernel.scale * total
        bits: Array = np.where(np.isnan(total_plus_base), np.nan, total_plus_base).view("u8")
    return bits


def _with_lengths(kernel: Magnitude, parts: Sequence[InputBox], indices: Sequence[Array]) -> Array:
    """Return the bits of rows with new lengths: their squares are added column by column."""
    np = numpy_module()
    rows, lengths = (values(part.dtype, part.bits) for part in parts)
    with np.errstate(all="ignore"):
        squares = np.cumsum(rows**2, axis=1)[:, -1]
        factors = lengths / squares**0.5
        at = (indices[0] - parts[0].starts[0])[:, None]
        scaled = rows[at, indices[1][None, :]] * factors[at]
        bits: Array = np.where(np.isnan(scaled), np.nan, scaled).view("u8")
    return bits


TILES: dict[type[Any], Callable[[Any, Sequence[InputBox], Sequence[Array]], Array]] = {
    LowRank: _with_product,
    Magnitude: _with_lengths,
}
