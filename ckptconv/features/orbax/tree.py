"""Reads the tree of an item: its arrays by their keys, and its values that are not arrays. Pure.

Source: orbax/checkpoint/_src/metadata/tree.py and tree/utils.py. A key is one of a dict, or an index of a list or a
tuple; Orbax does not distinguish the two. An array's name in the store is its keys joined by dots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.joining.names import Path, dotted, nest
from ckptconv.storage import strict_json
from ckptconv.text import quoted

NAME, STRINGS = "_METADATA", "_strings.json"
# Whether chunks of zeros are stored too: then Orbax restores no array that lacks one. Older releases do not record it.
_HAS_ALL = "store_array_data_equal_to_fill_value"
# Kinds of leaves: those with an array, numbers that are stored as an array, and all others.
ARRAY, SCALAR, VALUE = "array", "scalar", "value"
# Kinds of keys: an index, and a key of a dict.
_INDEX, _KEY = 1, 2
# Values that are not stored, by the type that the tree records.
_EMPTY: Mapping[str, type] = {"None": type(None), "Dict": dict, "List": list, "Tuple": tuple, "NamedTuple": tuple}
_STEP = {"key": re.compile(r".{0,4096}", re.DOTALL), "key_type": range(_INDEX, _KEY + 1)}
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
_MOST_KEYS, _DEEPEST = 128, 64


class Leaf(NamedTuple):
    """A leaf of a tree: its path of keys and indices, which begins with the name of its item if there are several, the
    number of the item, the name of its array, and its value if it has no array."""

    path: Path
    item: int
    name: str
    kind: str
    value: Any = None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(map(str, self.path))

    def is_below(self, keys: tuple[str, ...]) -> bool:
        """Return whether the keys of the leaf begin with `keys`."""
        return self.keys[: len(keys)] == keys


def leaves_of(data: bytes, texts: bytes | None, where: str, item: int, around: str) -> tuple[list[Leaf], bool]:
    """Return the leaves that the JSON `data` describes, and whether their arrays have all chunks, also those of zeros.
    `texts` are the texts among them, and `around` is the key of the item among others, "" for none.

    Raise CorruptError if two arrays have one name, or if the description is not Orbax's.
    """
    known: dict[str, Leaf] = {}
    try:
        strings = strict_json.check(strict_json.parse((texts or b"{}").decode()), {str: str}, f"its {STRINGS}")
        metadata = strict_json.object_of(strict_json.parse(data.decode(), constants=True, deepest=_DEEPEST), "it")
        for entry in strict_json.object_of(metadata.get("tree_metadata"), "its tree_metadata").values():
            leaf = _leaf(entry, where, strings, item, (around,) if around else ())
            earlier = known.setdefault(leaf.name, leaf)
            if earlier is not leaf:
                raise CorruptError(
                    f"{where}: {shown(earlier.path)} and {shown(leaf.path)} are both stored as {quoted(leaf.name)}, "
                    "so one has overwritten the other.",
                    "Save the tree with keys that contain no dots.",
                )
        has_all = strict_json.check(metadata.get(_HAS_ALL, False), bool, f"its {_HAS_ALL}")
    except ValueError as error:
        raise CorruptError(f"{where} is not a valid description of an Orbax tree: {error}.") from None
    return [*known.values()], has_all


def _leaf(entry: Any, where: str, strings: Mapping[str, str], item: int, around: Path) -> Leaf:
    fields = strict_json.object_of(entry, "an entry")
    steps = strict_json.check(fields.get("key_metadata"), [_STEP], "its key_metadata")
    value = strict_json.object_of(fields.get("value_metadata"), "its value_metadata")
    kind, is_skipped = strict_json.text_of(value.get("value_type"), "a value_type"), value.get("skip_deserialize")
    path = tuple(_key(step["key"], step["key_type"]) for step in steps)
    if not 0 < len(path) <= _MOST_KEYS:
        raise ValueError(f"it has the invalid path {shown(path)}")
    name = dotted(path)
    if is_skipped and kind not in _EMPTY:
        raise UnsupportedError(f"{where}: {shown(path)} has the type {kind!r:.100}, which Orbax does not store.")
    if kind == "string" and name not in strings:
        raise ValueError(f"{shown(path)} is a string, but {STRINGS} does not contain it")
    if is_skipped or kind == "string":
        return Leaf(around + path, item, name, VALUE, _EMPTY[kind]() if is_skipped else strings[name])
    return Leaf(around + path, item, name, SCALAR if kind == "scalar" else ARRAY)


def _key(key: str, kind: int) -> str | int:
    if kind == _KEY:
        return key
    if not _NUMBER.fullmatch(key):
        raise ValueError(f"{quoted(key)} is not a valid index")
    return int(key)


def shown(path: Path) -> str:
    """Return a path as messages show it."""
    return quoted("".join(f"[{key!r}]" for key in path))


def tree_of(leaves: Iterable[tuple[Leaf, Any]], where: str) -> Any:
    """Return the tree of leaves, each with its value. Raise CorruptError for keys that contradict each other, and for a
    list that lacks an item."""
    values = {leaf.path: value for leaf, value in leaves}
    parts = {path[:depth] for path in values for depth in range(1, len(path) + 1)}
    for part in parts:
        *holder, last = part
        if type(last) is int and last and (*holder, last - 1) not in parts:
            raise CorruptError(f"{where}: {shown(part)} is in a list without item {last - 1}.")
    return nest(values, where)
