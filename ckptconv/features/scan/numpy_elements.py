"""Elements of numpy's pickled dtypes: their sizes, and whether they hold objects. Pure.

Source: `arraydescr_reduce` and `arraydescr_setstate` in `numpy/_core/src/multiarray/descriptor.c` of numpy 2.4.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from ckptconv.pickles.nodes import Global, Opaque

DTYPE = Global("numpy", "dtype")
_CODE = re.compile(r"[<>|=]?([?bBhHiIlLuqQpPefdgFDGcmMSaUVO])([0-9]{0,9})(?:\[\w*\])?")
# Sizes of kinds that are named without one.
_ALONE = dict(
    zip(
        "?bBhHiIulLqQpPefdgFDGcmMO",
        (1, 1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 8, 8, 2, 4, 8, 16, 8, 16, 32, 1, 8, 8, 8),
        strict=True,
    )
)
# Flags: elements hold references, and are pickled as a list.
_OF_OBJECTS, _DEPTH = 3, 32


class Element(NamedTuple):
    """An element of a pickled dtype: its size in bytes, and whether it holds objects."""

    size: int
    has_objects: bool


def element(dtype: Any, depth: int = 0) -> Element:
    """Return the element of a pickled dtype.

    Raises ValueError for a dtype that numpy does not write.
    """
    is_one = type(dtype) is Opaque and dtype.cls == DTYPE and type(dtype.args) is tuple and bool(dtype.args)
    # One that has no state yet may get any.
    if not is_one or depth > _DEPTH or len(dtype.state) != 1:
        raise ValueError("not a numpy dtype")
    code = dtype.args[0]
    if type(code) is str:
        named = _CODE.fullmatch(code)
        if named is None:
            raise ValueError("a dtype that numpy does not support")
        kind, digits = named.groups()
        size = int(digits or _ALONE.get(kind, 0)) * (4 if kind == "U" else 1)
        item = Element(size, kind == "O")
    else:
        kind = "V"
        item = element(code, depth + 1) if type(code) is Opaque else Element(0, False)
    state = dtype.state[0]
    if type(state) is not tuple or len(state) < 8:
        raise ValueError("a dtype without a state")
    parts = list(state[4].values()) if type(state[4]) is dict else []
    if kind in "SaUV" and type(state[5]) is int and state[5] >= 0:
        # Of other kinds, numpy has the size by the name.
        item = Element(state[5], item.has_objects)
    inner = [(element(part[0], depth + 1), part[1]) for part in parts if type(part) is tuple and len(part) > 1]
    if len(inner) != len(parts) or any(
        type(at) is not int or at < 0 or at + field.size > item.size for field, at in inner
    ):
        raise ValueError("a dtype whose fields extend beyond it")
    if state[2] is not None:
        part, shape = state[2] if type(state[2]) is tuple and len(state[2]) == 2 else (None, None)
        repeated = element(part, depth + 1)
        if type(shape) is not tuple or math.prod(shape) * repeated.size != item.size:
            raise ValueError("a dtype whose size differs from that of its parts")
        inner.append((repeated, 0))
    # numpy takes flags from here: with wrong ones, it takes bytes of the pickle for pointers.
    has_objects = item.has_objects or any(field.has_objects for field, _ in inner)
    if type(state[7]) is not int or state[7] & _OF_OBJECTS != has_objects * _OF_OBJECTS:
        raise ValueError("a dtype with unexpected flags")
    return Element(item.size, has_objects)
