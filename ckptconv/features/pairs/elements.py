"""Compare elements by their bits, find the index of an element in a tensor, and show one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.strides import contiguous_strides

if TYPE_CHECKING:
    import numpy as np

    Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


def differing(left: memoryview | bytes, right: memoryview | bytes, itemsize: int) -> Mask:
    """Return for each element, of `itemsize` bytes, whether its bits differ. Both have the same length."""
    import numpy as np

    code = f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"
    first, second = (np.frombuffer(data, code) for data in (left, right))
    unequal: Mask
    if code[0] == "u":
        unequal = first != second
    else:
        rows = [elements.view("u1").reshape(-1, itemsize) for elements in (first, second)]
        unequal = (rows[0] != rows[1]).any(axis=1)
    return unequal


def place_of(number: int, shape: Sequence[int]) -> list[int]:
    """Return the index along each dimension of element `number` in C order."""
    place = []
    for step, extent in zip(contiguous_strides(shape), shape, strict=True):
        place.append(number // step % max(extent, 1))
    return place


def number_of(place: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number, in C order, of the element with this index along each dimension."""
    return sum(index * step for index, step in zip(place, contiguous_strides(shape), strict=True))


def shown(dtype: DType, bits: bytes, value: Callable[[DType, bytes], float]) -> str:
    """Return an element as text: its value, and its bits if the value does not determine them. `value` returns the
    number that the bits of a float are."""
    hexadecimal = bits[::-1].hex()
    if dtype.kind == "f":
        return f"{value(dtype, bits)!r} (bits {hexadecimal})"
    if dtype.kind in "iu":
        return str(int.from_bytes(bits, "little", signed=dtype.kind == "i"))
    if dtype.kind == "b" and bits in (b"\0", b"\1"):
        return str(bits == b"\1")
    return f"bits {hexadecimal}"
