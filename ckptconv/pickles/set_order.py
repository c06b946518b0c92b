"""An order of the elements of a set that is the same in every process, as their hashes are not."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from ckptconv.pickles.nodes import Opaque
from ckptconv.tensors.lazy import LazyTensor

# Elements are told apart by so many parts of them, in so many levels of sets in one another; those that have these in
# common stay as they come.
_PARTS, _LEVELS = 64, 4
_BIG = 1 << 256


def ordered(elements: Iterable[Any]) -> list[Any]:
    """The elements of a set by type, then numbers and strings by value, and others by what is in them."""
    known: dict[tuple[int, int], list[str]] = {}
    return sorted(elements, key=lambda element: _order(element, known))


def _order(element: Any, known: dict[tuple[int, int], list[str]], level: int = 0) -> tuple[str, Any, list[str]]:
    """What to order `element` by. `known` has the sets met inside others, by identity and level: one may be in many."""
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
