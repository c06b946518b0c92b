"""Sort the elements of a set in an order that is the same in every process, unlike the order of their hashes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from ckptconv.pickles.nodes import Opaque
from ckptconv.tensors.lazy import LazyTensor

# Only so many parts of an element are compared, and so many levels of nested sets. Elements that agree in these keep
# the order they come in.
_PARTS, _LEVELS = 64, 4
_BIG = 1 << 256


def ordered(elements: Iterable[Any]) -> list[Any]:
    """Return the elements of a set sorted by type, then integers and strings by value, and others by their contents."""
    known: dict[tuple[int, int], list[str]] = {}
    return sorted(elements, key=lambda element: _order(element, known))


def _order(element: Any, known: dict[tuple[int, int], list[str]], level: int = 0) -> tuple[str, Any, list[str]]:
    """Return the sort key of `element`. `known` caches keys of nested sets by identity and level."""
    kind = type(element)
    natural = element if kind in (int, str, bytes) else 0
    texts: list[str] = []
    stack = [element]
    while stack and len(texts) < _PARTS:
        value = stack.pop()
        kind = type(value)
        texts.append(kind.__name__)
        if isinstance(value, tuple):
            texts.append(str(len(value)))
            stack.extend(reversed(value[:_PARTS]))
        elif isinstance(value, frozenset):
            texts.append(str(len(value)))
            if level < _LEVELS:
                place = id(value), level
                if place not in known:
                    known[place] = sorted(repr(_order(part, known, level + 1)) for part in value)[:_PARTS]
                texts.extend(known[place])
        elif isinstance(value, LazyTensor):
            texts.extend((repr(value.origin()), value.dtype.name, repr(value.shape)))
        elif isinstance(value, Opaque):
            stack.append(value.cls)
        elif kind is float:
            texts.append(struct.pack(">d", value).hex())
        elif kind is int:
            texts.append(hex(value) if -_BIG < value < _BIG else f"{value.bit_length()} bits")
        elif kind in (str, bytes):
            texts.append(repr(value[:_PARTS]))
        elif kind in (complex, bool):
            texts.append(repr(value))
    return type(element).__name__, natural, texts
