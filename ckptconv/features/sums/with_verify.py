"""The bits that the kernel of sums gives, by an arithmetic of their own, for verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.features.sums.kernels import WeightedSum
from ckptconv.features.verify.arithmetic import CAST_BLOCK, values
from ckptconv.tensors.float_formats import numpy_module

if TYPE_CHECKING:
    from ckptconv.features.verify.arithmetic import Array


def _summed(kernel: WeightedSum, parts: Sequence[Array]) -> Array:
    """Return the bits of weighted sums: in float64, each product and each sum rounded, in the order of the parts."""
    np = numpy_module()
    result: Array = np.empty(parts[0].shape, "u8")
    flat = [part.reshape(-1) for part in parts]
    with np.errstate(all="ignore"):
        for at in range(0, result.size, CAST_BLOCK):
            total: Any = None
            for dtype, weight, part in zip(kernel.dtypes, kernel.weights, flat, strict=True):
                term = weight * values(dtype, part[at : at + CAST_BLOCK])
                total = term if total is None else total + term
            total = total / kernel.over
            result.reshape(-1)[at : at + CAST_BLOCK] = np.where(np.isnan(total), np.nan, total).view("u8")
    return result


JOINED: dict[type[Any], Callable[[Any, Sequence[Array]], Array]] = {WeightedSum: _summed}
