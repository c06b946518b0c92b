"""The kernels `Xor` and `Overlay`: bytes of a tensor with changes, and the changes of a delta laid over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.kernels import ElementMaker


class Xor(NamedTuple):
    """Combine bytes by exclusive or. The input is `blocks` blocks of equal size, one after the other."""

    blocks: int


class Overlay(NamedTuple):
    """Replace some bytes. The input is the old bytes, then, for each of `layers`, a unit of two bytes for each byte.

    The bits of 1 in the second byte of a unit mark the bits of the first byte that replace the old ones.
    """

    layers: int


def _xor(kernel: Xor, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    blocks = np.frombuffer(data, "u1").reshape(kernel.blocks, -1)
    result = np.frombuffer(out, "u1")
    np.bitwise_xor(blocks[0], blocks[1], out=result)
    for block in blocks[2:]:
        result ^= block
    return 0


def _overlay(kernel: Overlay, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    result = np.frombuffer(out, "u1")
    result[...] = np.frombuffer(data, "u1", len(out))
    for units in np.frombuffer(data, "u1", offset=len(out)).reshape(kernel.layers, len(out), 2):
        values, mask = units[:, 0], units[:, 1]
        result &= ~mask
        result |= values & mask
    return 0


def _fits_layers(before: Sequence[DType], after: DType, layers: int, size: int) -> bool:
    """Return whether `layers` layers of elements of `size` bytes are above one of single bytes."""
    first, *others = (dtype.itemsize for dtype in before)
    return first == after.itemsize == 1 and len(others) == layers and {*others} <= {size}


JOINING: dict[type[Any], ElementMaker] = {
    Xor: ElementMaker(
        "xor",
        _xor,
        lambda kernel: (kernel.blocks, 1),
        lambda kernel, before, after: _fits_layers(before, after, kernel.blocks - 1, 1),
    ),
    Overlay: ElementMaker(
        "overlay",
        _overlay,
        lambda kernel: (1 + 2 * kernel.layers, 1),
        lambda kernel, before, after: _fits_layers(before, after, kernel.layers, 2),
    ),
}
