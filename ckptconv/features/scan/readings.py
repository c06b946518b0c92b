"""The content of the pickles in a file: their readings, and the bytes in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from ckptconv.features.scan.grammar.judge import Judge
from ckptconv.features.scan.names import LOADERS
from ckptconv.pickles import watching
from ckptconv.pickles.children import CHILDREN, MAPPINGS
from ckptconv.pickles.nodes import Opaque

_T = TypeVar("_T")


def _joined(some: tuple[_T, ...], others: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(some + others))


class Readings:
    """The readings of pickles, in order. A pickle may be read several times, each time further; all readings count."""

    def __init__(self) -> None:
        self._found: dict[str, watching.PickleReading] = {}
        self._judges: list[Judge] = []

    def add(self, reading: watching.PickleReading) -> None:
        before = self._found.get(reading.where)
        if before is not None:
            reading = reading._replace(
                called=_joined(before.called, reading.called),
                suspects=_joined(before.suspects, reading.suspects),
                unknown=_joined(before.unknown, reading.unknown),
                unknown_calls=_joined(before.unknown_calls, reading.unknown_calls),
            )
        self._found[reading.where] = reading

    def judge(self, size: int) -> Judge:
        """Return a judge for one pickle."""
        self._judges.append(Judge(size))
        return self._judges[-1]

    def dropped(self) -> list[bytes]:
        """Return bytes that were loaded by calls whose results the pickles dropped."""
        loaded = (bytes(data) for judge in self._judges for name, data in judge.bytes_given if str(name) in LOADERS)
        candidates = dict.fromkeys(loaded)
        if not candidates:
            return []
        kept = {
            bytes(data)
            for reading in self.all()
            if not reading.broken
            for data, loads in all_bytes(reading.value)
            if loads
        }
        return [data for data in candidates if data not in kept]

    def all(self) -> list[watching.PickleReading]:
        return list(self._found.values())


def all_bytes(value: Any) -> Iterator[tuple[bytes | bytearray, bool]]:
    """Yield the bytes in a tree, and whether loading the tree loads them too."""
    # Most trees have none. This is `walk`, without the cost of yielding each node.
    stack, seen = [value], set[int]()
    # The arguments of a call are a tuple, which comes after the call.
    loaded: set[int] = set()
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind is bytes or kind is bytearray:
            yield node, False
        elif kind in CHILDREN and id(node) not in seen:
            seen.add(id(node))
            if kind is Opaque and node.name in LOADERS and type(node.args) is tuple:
                loaded.add(id(node.args))
            if id(node) in loaded:
                yield from ((part, True) for part in node if type(part) in (bytes, bytearray))
                stack += (part for part in node if type(part) not in (bytes, bytearray))
            else:
                stack += CHILDREN[kind](node)
            if kind in MAPPINGS:
                stack += node
