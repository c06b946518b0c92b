"""The structure record of a tree: the parts that its writer and its reader share. docs/structure.md has its grammar."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ckptconv.structure.parted import PartedTensor

VERSION = 1
# The deepest nesting of nodes: many JSON readers stop at 128 levels or soon after.
NESTED = 60
# The places of the record: in the metadata of a single file, or in a file of its own next to several.
METADATA_KEY = "ckptconv.structure"
# The name of the metadata in a header.
METADATA = "__metadata__"
# The metadata entry for the map that gave an output its names and layouts.
MAP_KEY = "ckptconv.map"
FILE_NAME = "ckptconv.structure.json"
# Keys of the metadata with a meaning of their own, which are never aliases.
# In the metadata: the output was made with --alone of one file of many.
ALONE_KEY = "ckptconv.alone"
RESERVED = frozenset({"format", "total_size", METADATA_KEY, MAP_KEY, ALONE_KEY})
# Strings and bytes up to this length are written at each occurrence; longer ones once.
SHORT = 64
# Integers up to this magnitude are exact in every JSON reader.
EXACT = 1 << 53
# The most characters of a path above a tensor, and of a key below the top, that its name takes.
LONGEST = 240

# Factories that a defaultdict may have.
FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
} | {"collections.OrderedDict": OrderedDict, "collections.Counter": Counter}

# Nodes whose children's names follow from the path: the first child's index, and whether they are keys and values.
NAMING = {"dict": (1, True), "odict": (2, True), "list": (1, False), "tuple": (1, False)}


class Flattened(NamedTuple):
    """A tree as tensors by name, in its order, and its structure record; None if it needs none.

    `uncastable` are names of tensors that must not be cast, as their values mean nothing alone: parts of complex
    numbers stored as pairs, of quantized tensors, and of those of other classes. `values` are the top-level keys that
    lead to values in the record, other than tensors and the versions of a state dict. `inert`: the record has objects
    known by name only, and no tensor outside them. `found` are, by name, chosen objects that were left out or replaced.
    `quantized` are the tensors that are stored in parts, by name.
    """

    tensors: dict[str, Any]
    structure: str | None
    uncastable: frozenset[str]
    values: tuple[str, ...] = ()
    inert: bool = False
    found: Mapping[str, Any] = MappingProxyType({})
    quantized: Mapping[str, PartedTensor] = MappingProxyType({})


def dump(root: Any, nodes: Sequence[Any], storages: Sequence[Any]) -> str:
    """Return the JSON text of a record."""
    record = {"version": VERSION, "root": root}
    if nodes:
        record["nodes"] = nodes
    if storages:
        record["storages"] = storages
    return json.dumps(record, ensure_ascii=False, check_circular=False, separators=(",", ":"), allow_nan=False)


# -------------------------------------------------------------------------------------------------- names of tensors


def implied_name(prefix: str | None, key: Any) -> str | None:
    """Return the default name of a tensor under `key` in a container of `prefix`; None if its name must be written."""
    if prefix is None:
        return None
    if type(key) is str:
        return prefix + key if not prefix or len(key) <= LONGEST else None
    return f"{prefix}{key}" if type(key) is int and -EXACT <= key <= EXACT else None


def inner_prefix(prefix: str | None, key: Any) -> str | None:
    """Return the prefix of a container under `key` in a container of `prefix`; None if names in it must be written."""
    if type(key) is str and len(key) > LONGEST:
        return None
    name = implied_name(prefix, key)
    return None if name is None or len(name) >= LONGEST else name + "."


def plain_record(names: Iterable[str]) -> str:
    """Return the record of a plain dict of tensors with these keys, in this order."""
    return dump(["dict", *chain.from_iterable(zip(names, repeat({})))], [], [])
