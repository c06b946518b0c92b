"""The bits that the kernels of deltas give, by an arithmetic of their own, for verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.features.deltas.kernels import Overlay, Xor
from ckptconv.tensors.float_formats import numpy_module

if TYPE_CHECKING:
    from ckptconv.features.verify.arithmetic import Array


def _laid_over(kernel: Overlay, parts: Sequence[Array]) -> Array:
    laid: Array = parts[0]
    for units in parts[1:]:
        mask = units >> 8
        laid = (laid - (laid & mask) + (units & mask)).astype("u1")
    return laid


def _differences(kernel: Xor, parts: Sequence[Array]) -> Array:
    result: Array = numpy_module().zeros(parts[0].shape, "u1")
    for part in parts:
        # a ^ b without carries: the bits that are in either, less those that are in both
        result = (result | part) - (result & part)
    return result


JOINED: dict[type[Any], Callable[[Any, Sequence[Array]], Array]] = {
    Xor: _differences,
    Overlay: _laid_over,
}
