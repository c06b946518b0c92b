"""numpy's dtypes of plain elements, as strings such as "<f8", "|S3" and "<m8[25s]". Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_NOTATION = re.compile(r"([<>|=]?)([biufcSUVmM])(0|[1-9][0-9]{0,8})(?:\[([1-9][0-9]{0,9})?([A-Za-z]{1,2})\])?")
# Element sizes in bytes that numpy has for each kind; for the others any.
_SIZES = {
    "b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 12, 16), "c": (8, 16, 24, 32), "m": (8,), "M": (8,)
}  # fmt: skip
# torch's names of dtypes, by numpy's without the byte order.
TORCH_NAMES = {
    "b1": "bool",
    **{f"{kind}{size}": f"{name}{8 * size}" for kind, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    "c8": "complex64",
    "c16": "complex128",
}
# Units of dates and times.
UNITS = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"})
MOST_COUNT = (1 << 31) - 1


class NumpyDtype(NamedTuple):
    """A dtype of plain elements: byte order ("" if not said), kind, and the number in its name, which counts bytes, or
    for kind U characters.

    Elements of dates and times (kinds m and M) count `multiple` of a `unit`; "" is numpy's generic unit.
    """

    order: str
    kind: str
    size: int
    multiple: int = 1
    unit: str = ""

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self.size * (4 if self.kind == "U" else 1)

    def __str__(self) -> str:
        counted = f"[{self.multiple if self.multiple > 1 else ''}{self.unit}]" if self.unit else ""
        return f"{self.order}{self.kind}{self.size}{counted}"


def parsed(text: str) -> NumpyDtype | None:
    """Return the dtype of plain elements that `text` names; None if numpy has none of that name."""
    match = _NOTATION.fullmatch(text)
    if not match:
        return None
    order, kind, size, count, unit = match.groups()
    dtype = NumpyDtype(order, kind, int(size), int(count or 1), unit or "")
    if dtype.size not in _SIZES.get(kind, (dtype.size,)) or dtype.multiple > MOST_COUNT:
        return None
    return dtype if unit is None or (kind in "mM" and unit in UNITS) else None


def is_lacking(text: str) -> bool:
    """Return whether `text` has the form of a dtype of plain elements, and numpy has none of that name."""
    return parsed(text) is None and _NOTATION.fullmatch(text) is not None
