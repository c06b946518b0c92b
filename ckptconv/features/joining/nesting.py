"""Builds nested dicts from values and their paths. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError


class Nested(NamedTuple):
    """Nested dicts (`tree`), and where each inner dict is: the dict that holds it, and its key; outer ones first."""

    tree: dict[Any, Any]
    inner: list[tuple[dict[Any, Any], Any]]


def nest(leaves: Iterable[tuple[tuple[Any, ...], Any]], where: str, shown: Callable[[tuple[Any, ...]], str]) -> Nested:
    """Return the dicts that hold `leaves`, pairs of a path of keys and a value.

    Raise CorruptError for a path that leads through a value, or occurs twice. `where` names the file in it, and `shown`
    turns a path into text.
    """
    nested = Nested({}, [])
    dicts = {id(nested.tree)}
    for path, leaf in leaves:
        node = nested.tree
        for step in path[:-1]:
            if step not in node:
                node[step] = {}
                dicts.add(id(node[step]))
                nested.inner.append((node, step))
            node = node[step]
            if id(node) not in dicts:
                raise CorruptError(f"{where}: {shown(path)} is inside another value.")
        if path[-1] in node:
            raise CorruptError(f"{where}: there are two values for {shown(path)}.")
        node[path[-1]] = leaf
    return nested
