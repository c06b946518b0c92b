"""Parts of quantized weights that are no numbers of them, and determine their sizes: the contents of their few bytes.

Each function raises ValueError if that cannot be.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ckptconv.storage import strict_json

# Returns the sizes, by name, that the bytes of a part state.
Telling: TypeAlias = "Callable[[bytes], Mapping[str, Any]]"
_SIDE = range(1, 1 << 31)
_STATE = {
    **dict.fromkeys(("quant_type?", "dtype?", "nested_dtype?"), str),
    **dict.fromkeys(("nested_blocksize?", "nested_offset?"), object),
    "shape": [int],
    "blocksize": _SIDE,
}
_LARGEST_FLOAT, _MOST_DIMENSIONS, _DEEPEST = 3.4e38, 8, 16


def shape(data: bytes) -> Mapping[str, Any]:
    """Return the rows and columns in compressed-tensors' `weight_shape`."""
    if len(data) != 16:
        raise ValueError(f"its shape has {len(data)} bytes; expected two integers of 8 bytes")
    rows, columns = struct.unpack("<qq", data)
    if rows < 0 or columns < 0:
        raise ValueError(f"its shape is {[rows, columns]}, which is not valid")
    return {"M": rows, "K": columns}


def state(data: bytes) -> Mapping[str, Any]:
    """Return the content of bitsandbytes' `quant_state`, JSON as bytes."""
    try:
        fields = strict_json.check(strict_json.parse(data.decode(), deepest=_DEEPEST), _STATE, "it")
        sides = tuple(fields["shape"])
        sizes: dict[str, Any] = {"C": fields["blocksize"], "F": math.prod(sides), "view": sides}
        if fields.get("nested_blocksize") is not None:
            side = strict_json.check(fields["nested_blocksize"], _SIDE, "its nested block")
            sizes |= {"D": side, "shift": strict_json.check(fields.get("nested_offset"), float, "its offset")}
    except ValueError as error:
        raise ValueError(f"its state cannot be read: {error}") from None
    if len(sides) > _MOST_DIMENSIONS or abs(sizes.get("shift", 0)) > _LARGEST_FLOAT:
        raise ValueError("its state lacks a valid shape or offset")
    return sizes


def byte(name: str, *known: int) -> Telling:
    """Return the function that checks a byte of this name, which has to be one of the `known`."""

    def telling(data: bytes) -> Mapping[str, Any]:
        if len(data) != 1 or data[0] not in known:
            raise ValueError(f"its {name} is {list(data[:8])}; expected {some_of(known)}")
        return {}

    return telling


def integers(name: str, count: int = 1) -> Telling:
    """Return the function that reads so many integers of 32 or 64 bits, each at least 0: alone, or as a tuple."""

    def telling(data: bytes) -> Mapping[str, Any]:
        if len(data) not in (4 * count, 8 * count):
            raise ValueError(f"its {name} has {len(data)} bytes; expected {count} integer{'s' if count > 1 else ''}")
        value = struct.unpack(f"<{count}{'i' if len(data) == 4 * count else 'q'}", data)
        if min(value) < 0:
            raise ValueError(f"its {name} is {min(value)}, but must not be negative")
        return {name: value[0] if count == 1 else value}

    return telling


def text(name: str, *known: str) -> Telling:
    """Return the function that reads a text from bytes, which has to be one of the `known`."""

    def telling(data: bytes) -> Mapping[str, Any]:
        value = data.decode(errors="replace")
        if value not in known:
            raise ValueError(f"its {name} is {value[:40]!r}; expected {some_of(known)}")
        return {name: value}

    return telling


def some_of(known: tuple[object, ...]) -> str:
    """Return the allowed values in words, for a message."""
    return " or ".join(map(repr, known))
