"""The bits that the kernel of maps gives, by an arithmetic of its own, for verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.features.maps.kernels import OPERATIONS, Arithmetic
from ckptconv.features.verify.arithmetic import CAST_BLOCK, FORMATS, nearest, values
from ckptconv.tensors.float_formats import numpy_module

if TYPE_CHECKING:
    from ckptconv.features.verify.arithmetic import Array


def _computed(kernel: Arithmetic, parts: Sequence[Array]) -> Array:
    """Return the bits of the results. float64 has more than twice the digits of float32, so that rounding its results
    to float32 is as good as rounding once."""
    np = numpy_module()
    (bits,) = parts
    result: Array = np.empty_like(bits.reshape(-1))
    with np.errstate(all="ignore"):
        for at in range(0, bits.size, CAST_BLOCK):
            block = bits.reshape(-1)[at : at + CAST_BLOCK]
            exact = values(kernel.dtype, block)
            computed = OPERATIONS[kernel.operation](exact, kernel.number)
            rounded = nearest(computed, FORMATS[kernel.dtype]) if kernel.dtype == "float32" else computed
            rounded_bits = rounded.astype(kernel.dtype).view(bits.dtype)
            result[at : at + CAST_BLOCK] = np.where(np.isnan(exact), block, rounded_bits)
    return result.reshape(bits.shape)


JOINED: dict[type[Any], Callable[[Any, Sequence[Array]], Array]] = {Arithmetic: _computed}
