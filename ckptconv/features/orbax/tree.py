"""Reads the tree of an item: its arrays by their keys, and its values that are not arrays. Pure.

Source: orbax/checkpoint/_src/metadata/tree.py and tree/utils.py. A key is one of a dict, or an index of a list or a
tuple; Orbax does not distinguish the two. An array's name in the store is its keys joined by dots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.joining.nesting import nest
from ckptconv.storage import strict_json
from ckptconv.text import quoted

NAME, STRINGS = "_METADATA", "_strings.json"
# Whether chunks of zeros are stored too: then Orbax restores no array that lacks one. Older releases do not record it.
_HAS_ALL = "store_array_data_equal_to_fill_value"
# Kinds of leaves: those with an array, numbers that are stored as an array, and all others.
ARRAY, SCALAR, VALUE = "array", "scalar", "value"
_INDEX, KEY = 1, 2
# Values that are not stored, by the type that the tree records.
_EMPTY: Mapping[str, type] = {"None": type(None), "Dict": dict, "List": list, "Tuple": tuple, "NamedTuple": tuple}
_STEP = {"key": re.compile(r".{0,4096}", re.DOTALL), "key_type": range(_INDEX, KEY + 1)}
_MOST_KEYS, _DEEPEST = 128, 64
Path: TypeAlias = tuple[tuple[int, str], ...]


class Leaf(NamedTuple):
    """A leaf of a tree: its path, which begins with the name of its item if there are several, the number of the item,
    the name of its array, and its value if it has no array."""

    path: Path
    item: int
    name: str
    kind: str
    value: Any = None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for _, key in self.path)


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
            leaf = _leaf(entry, where, strings, item, ((KEY, around),) if around else ())
            earlier = known.setdefault(leaf.name, leaf)
            if earlier is not leaf:
                raise CorruptError(
                    f"{where}: {shown(earlier.path)} and {shown(leaf.path)} are both stored as {quoted(leaf.name)}, so "
                    "that one has the values of the other.",
                    "Save it with keys that have no dots.",
                )
        has_all = strict_json.check(metadata.get(_HAS_ALL, False), bool, f"its {_HAS_ALL}")
    except ValueError as error:
        raise CorruptError(f"{where} is no description of a tree of Orbax: {error}.") from None
    return [*known.values()], has_all


def _leaf(entry: Any, where: str, strings: Mapping[str, str], item: int, around: Path) -> Leaf:
    fields = strict_json.object_of(entry, "an entry")
    steps = strict_json.check(fields.get("key_metadata"), [_STEP], "its key_metadata")
    value = strict_json.object_of(fields.get("value_metadata"), "its value_metadata")
    kind, is_skipped = strict_json.text_of(value.get("value_type"), "a value_type"), value.get("skip_deserialize")
    path = tuple((step["key_type"], step["key"]) for step in steps)
    if not 0 < len(path) <= _MOST_KEYS or any(
        kind == _INDEX and not re.fullmatch(r"\d{1,9}", key) for kind, key in path
    ):
        raise ValueError(f"it has the path {shown(path)}")
    name = ".".join(key for _, key in path)
    if is_skipped and kind not in _EMPTY:
        raise UnsupportedError(f"{where}: {shown(path)} is {kind!r:.100}, which Orbax stores nowhere.")
    if kind == "string" and name not in strings:
        raise ValueError(f"{shown(path)} is a text, which {STRINGS} lacks")
    if is_skipped or kind == "string":
        return Leaf(around + path, item, name, VALUE, _EMPTY[kind]() if is_skipped else strings[name])
    return Leaf(around + path, item, name, SCALAR if kind == "scalar" else ARRAY)


def shown(path: Path) -> str:
    """Return a path as messages show it."""
    return quoted("".join(f"[{key}]" if kind == _INDEX else f"[{key!r}]" for kind, key in path))


def tree_of(leaves: Iterable[tuple[Leaf, Any]], where: str) -> Any:
    """Return the tree of leaves, each with its value. Raise CorruptError for keys that contradict each other."""
    nested = nest(((leaf.path, value) for leaf, value in leaves), where, shown)
    top: dict[Any, Any] = {"": nested.tree}
    for holder, key in reversed([(top, ""), *nested.inner]):
        node = holder[key]
        holder[key] = {key: value for (_, key), value in node.items()}
        if any(kind == _INDEX for kind, _ in node):
            listed = {int(key) if kind == _INDEX else -1: value for (kind, key), value in node.items()}
            if sorted(listed) != [*range(len(node))]:
                raise CorruptError(f"{where}: a list has the indices {quoted(' '.join(key for _, key in node))}.")
            holder[key] = [listed[at] for at in range(len(node))]
    return top[""]
