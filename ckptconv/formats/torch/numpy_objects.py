"""Turns numpy's pickles into data: dtypes of plain elements, arrays and scalars.

The names and argument lists come from `numpy/_core/multiarray.py`, `numeric.py` and `src/multiarray/descriptor.c`, from
the first releases on.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ckptconv.pickles import numpy_dtypes
from ckptconv.pickles.nodes import Global, NumpyArray, NumpyScalar, Opaque
from ckptconv.pickles.vocabulary import MalformedError
from ckptconv.tensors.dtypes import DTYPES, itemsize_of_components
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor
from ckptconv.tensors.moves import Swap
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS
from ckptconv.text import brief

_NUMPY_DTYPE_CLASS, _NUMPY_ARRAY_CLASS = Global("numpy", "dtype"), Global("numpy", "ndarray")


def made_dtype(args: tuple[Any, ...]) -> Opaque:
    """Return the value of numpy.dtype("f8", align, copy), which its BUILD completes."""
    named = args[0] if 1 <= len(args) <= 3 else None
    if type(named) not in (str, Global, Opaque) or any(type(flag) not in (bool, int) for flag in args[1:]):
        raise MalformedError("has an invalid numpy.dtype")
    if type(named) is str and numpy_dtypes.is_lacking(named):
        raise MalformedError(f"has a numpy.dtype {named!r}, which numpy lacks")
    return Opaque(Global("numpy", "dtype"), args)


def made_array(cls: Global, args: tuple[Any, ...]) -> Opaque:
    """Return an array of (class, shape, element type); BUILD completes it."""
    if len(args) != 3 or type(args[0]) not in (Global, Opaque):
        raise MalformedError("has a numpy array with invalid parts")
    return Opaque(cls, args)


def numpy_dtype(value: Any) -> tuple[str, int] | None:
    """Return a dtype of plain elements in numpy's notation, such as "<f8", and its element size in bytes; else None.

    `value` is the object that the pickle built by numpy.dtype("f8", align, copy) and its state (version, byte order,
    subdtype, names, fields, size, alignment, flags; for dates and times also the unit). Raises MalformedError for a
    value that is no dtype, and for a dtype that contradicts itself.
    """
    if type(value) is not Opaque:
        raise MalformedError("has a numpy value with an invalid dtype")
    if value.cls != _NUMPY_DTYPE_CLASS or not value.args or type(value.args[0]) is not str:
        return None
    named = numpy_dtypes.parsed(value.args[0])
    if not named:
        return None
    order, kind, size = named.order, named.kind, named.itemsize
    if value.state:
        state = value.state[-1]
        if type(state) is not tuple:
            raise MalformedError("has a numpy.dtype whose state is not a tuple")
        if len(state) < 8 or any(part is not None for part in state[2:5]):
            return None
        order = state[1]
        # numpy takes the size of kinds S, U and V from the state. Only elements without a byte order have "|".
        orders = ("<", ">", "=", *("|" if kind in "SV" or size == 1 else ()))
        if type(order) is not str or order not in orders or (kind in "SUV" and state[5] != size):
            raise MalformedError(f"has a numpy.dtype {value.args[0]!r} with a state that does not fit it")
        # Without `copy`, the state changes nothing: numpy has one shared object for such a dtype.
        if ">" in (order, named.order) and order != named.order and not (len(value.args) == 3 and value.args[2]):
            raise MalformedError(f"has a numpy.dtype {value.args[0]!r} with two different byte orders")
        if kind in "mM":
            counted = _unit(state[8:])
            if counted is None:
                return None
            named = named._replace(multiple=counted[0], unit=counted[1])
    if kind in "SV" or size == 1:
        order = "|"
    elif order != ">":
        order = "<"
    return str(named._replace(order=order)), size


def _unit(state: tuple[Any, ...]) -> tuple[int, str] | None:
    """Return the unit of dates or times, such as (25, "s"); (1, "") for the generic unit, None for an unknown one.

    `state` is ((metadata, (unit, multiple, divisor, event)),).
    """
    metadata, counted = state[0] if len(state) == 1 and type(state[0]) is tuple and len(state[0]) == 2 else (1, ())
    if metadata or type(counted) is not tuple or len(counted) != 4 or counted[2:] != (1, 1):
        return None
    name, count = counted[:2]
    name = str(name, "ascii", "replace") if type(name) is bytes else name
    if type(name) is not str or type(count) is not int or not 1 <= count <= numpy_dtypes.MOST_COUNT:
        return None
    if name == "generic":
        return 1, ""
    return (count, name) if name in numpy_dtypes.UNITS else None


def _raw(data: Any, nbytes: int) -> bytes | None:
    """Return the bytes of an array if they are `nbytes` long, else None. Python 2 pickles a str, now perhaps text."""
    if type(data) is str:
        data = data.encode("utf-8", "surrogatepass")
    return bytes(data) if type(data) in (bytes, bytearray) and len(data) == nbytes else None


def _array(shape: Any, dtype: Any, order: str, data: Any) -> Any:
    plain = numpy_dtype(dtype)
    if type(shape) is not tuple or len(shape) > MAX_DIMS:
        raise MalformedError("has a numpy array with an invalid shape")
    if any(type(count) is not int or not 0 <= count < MAX_BYTES for count in shape):
        raise MalformedError("has a numpy array whose shape does not consist of non-negative integers")
    if plain is None:
        return NotImplemented
    raw = _raw(data, math.prod(shape) * plain[1])
    if raw is None:
        elements = f"{len(data)} bytes" if type(data) in (bytes, bytearray, str) else f"a {type(data).__name__}"
        raise MalformedError(f"has a numpy array of shape {brief(shape)} with {elements} for its elements")
    return NumpyArray(plain[0], shape, order, raw)


def build_array(value: Opaque, state: Any) -> Any:
    """Set the state of an array: (version, shape, dtype, Fortran order, data). The oldest numpy has no version."""
    if type(value.args) is not tuple or value.args[:1] != (_NUMPY_ARRAY_CLASS,) or value.state:
        return NotImplemented
    if type(state) is tuple and len(state) == 4:
        state = (0, *state)
    sound = type(state) is tuple and len(state) == 5 and type(state[0]) is int and state[0] in (0, 1)
    if not sound or type(state[3]) not in (bool, int):
        raise MalformedError("has a numpy array with an invalid state")
    array = _array(state[1], state[2], "F" if state[3] else "C", state[4])
    return _native(array) if type(array) is NumpyArray and array.dtype[0] == ">" else array


def _native(array: NumpyArray) -> NumpyArray:
    """Convert a big-endian array to little-endian, as numpy does when it sets the array's state."""
    kind, size = array.dtype[1], int(re.match("[0-9]+", array.dtype[2:])[0])  # type: ignore[index]
    unit = 4 if kind == "U" else size // 2 if kind == "c" else size
    data = bytearray(len(array.data))
    for at in range(unit):
        data[at::unit] = array.data[unit - 1 - at :: unit]
    return NumpyArray(f"<{array.dtype[1:]}", array.shape, array.order, bytes(data))


def from_buffer(args: tuple[Any, ...]) -> Any:
    """Return the array of (data, dtype, shape, order), as protocol 5 pickles it."""
    if len(args) != 4 or args[3] not in ("C", "F"):
        raise MalformedError("has a numpy array with invalid parts")
    return _array(args[2], args[1], args[3], args[0])


def scalar(args: tuple[Any, ...]) -> Any:
    """Return the scalar of (dtype, data)."""
    if len(args) != 2:
        raise MalformedError("has a numpy scalar with invalid parts")
    plain = numpy_dtype(args[0])
    if plain is None:
        return NotImplemented
    raw = _raw(args[1], plain[1])
    if raw is None:
        raise MalformedError(f"has a numpy scalar of {plain[0]} that does not have {plain[1]} bytes")
    return NumpyScalar(plain[0], raw)


def from_numpy(array: NumpyArray) -> LazyTensor:
    """Return the array as a tensor. Raises MalformedError if torch lacks its dtype."""
    name = numpy_dtypes.TORCH_NAMES.get(array.dtype[1:])
    if name is None:
        raise MalformedError(f"has a tensor created from a numpy array of {array.dtype[:40]}")
    dtype = DTYPES[name]
    data = array.data
    if array.order == "F" and sum(count > 1 for count in array.shape) > 1:
        import numpy as np

        data = np.frombuffer(data, f"V{dtype.itemsize}").reshape(array.shape, order="F").tobytes()
    tensor: LazyTensor = Inline(data, dtype, array.shape)
    unit = itemsize_of_components(dtype)
    return Convert(tensor, Swap(unit), dtype) if array.dtype[0] == ">" and unit > 1 else tensor
