"""The structure record of a tree: the code that its writer and its reader share. docs/structure.md has its grammar."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckptconv.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from ckptconv.structure.parted import PartedTensor

VERSION = 1
# The deepest nesting of nodes: many JSON readers stop at 128 levels or soon after.
NESTED = 60
# The places of the record: in the metadata of a single file, or in a file of its own next to several.
METADATA_KEY = "ckptconv.structure"
# The name in a header under which the metadata are.
METADATA = "__metadata__"
# The metadata entry that holds the map by which an output got its names and layouts.
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


class StructureRecord(NamedTuple):
    """A parsed record. The table and the storages are lists of the right form; the nodes are not checked."""

    root: Any
    nodes: list[Any]
    storages: list[tuple[int, str]]


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


def compacted(
    root: Any, nodes: Sequence[Any], storages: Sequence[Any], pinned: Collection[int]
) -> tuple[Any, list[Any], list[Any]]:
    """Return the parts of a record without nodes and storages that nothing refers to; keep nodes that are `pinned`.

    References are changed in place.
    """
    reached: dict[int, None] = dict.fromkeys(pinned)
    used: dict[int, None] = {}
    references: list[list[Any]] = []
    leaves: list[dict[str, Any]] = []
    stack = [root, *(nodes[index] for index in reached)]
    while stack:
        node = stack.pop()
        indices: list[int] = []
        if type(node) is dict:
            leaves.append(node)
            stack.append(node.get("kind"))
            used.update(dict.fromkeys(node["storage"][:1] if "storage" in node else ()))
            indices = [node["attributes"]] if "attributes" in node else []
        elif type(node) is list and node[0] == "@":
            references.append(node)
            indices = [node[1]]
        elif type(node) is list:
            stack.extend(node)
        for index in indices:
            if index not in reached:
                reached[index] = None
                stack.append(nodes[index])
    places = {index: place for place, index in enumerate(sorted(reached))}
    homes = {index: place for place, index in enumerate(sorted(used))}
    for reference in references:
        reference[1] = places[reference[1]]
    for leaf in leaves:
        if "attributes" in leaf:
            leaf["attributes"] = places[leaf["attributes"]]
        if "storage" in leaf:
            leaf["storage"][0] = homes[leaf["storage"][0]]
    return root, [nodes[index] for index in places], [storages[index] for index in homes]


def parse(structure: str) -> StructureRecord:
    """Parse a record. Raise UnsupportedError for an unknown version, CorruptError for text that is no record."""
    from ckptconv.storage import strict_json

    try:
        record = strict_json.parse(structure)
    except ValueError as error:
        corrupt(f"it cannot be read: {error}")
    if type(record) is not dict or type(record.get("version")) is not int:
        corrupt("it is not an object with a version")
    if record["version"] != VERSION:
        raise UnsupportedError(
            f"The structure record is of version {record['version']}, but only version {VERSION} is supported.",
            "Use the release of ckptconv that wrote it, or a later one.",
        )
    nodes, storages = record.get("nodes", []), record.get("storages", [])
    expect(
        "root" in record and type(nodes) is list and type(storages) is list, "it does not have the parts of a record"
    )
    for storage in storages:
        valid = type(storage) is list and len(storage) == 2 and is_count(storage[0]) and type(storage[1]) is str
        expect(valid, "a storage is not a size and a dtype")
    return StructureRecord(record["root"], nodes, storages)


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


def name_of(leaf: Mapping[str, Any], implied: str | None) -> str:
    """Return the name of the tensor that `leaf` describes."""
    name = leaf.get("name", implied)
    expect(type(name) is str, "a tensor has no name")
    return str(name)


def tensors_of(record: StructureRecord) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield every tensor in a record, with the name it has if it does not state one."""
    stack: list[tuple[Any, str | None]] = []
    for node in (record.root, *record.nodes):
        if type(node) is dict:
            yield node, None
        elif type(node) is list:
            stack.append((node, ""))
    while stack:
        node, prefix = stack.pop()
        tag = node[0] if node and type(node[0]) is str else ""
        start, paired = NAMING.get(tag, (0, False))
        for at in range(1, len(node) if tag not in _WITHOUT_TENSORS else 0):
            child = node[at]
            kind = type(child)
            if kind is not list and kind is not dict:
                continue
            key = None
            if start and at >= start:
                key = at - start if not paired else _key(record, node[at - 1]) if (at - start) % 2 else None
            if kind is dict:
                yield child, implied_name(prefix, key)
            else:
                stack.append((child, inner_prefix(prefix, key)))


_WITHOUT_TENSORS = frozenset({"@", "float", "int", "str", "bytes", "complex"})


def _key(record: StructureRecord, node: Any) -> Any:
    """Return a key, with a reference resolved."""
    return node_at(record, node[1]) if type(node) is list and len(node) == 2 and node[0] == "@" else node


def node_at(record: StructureRecord, index: Any) -> Any:
    """Return node `index` of the table."""
    if not (is_count(index) and index < len(record.nodes)):
        corrupt(f"it refers to node {index!r} of {len(record.nodes)}")
    return record.nodes[index]


# ----------------------------------------------------------------------------------------------------- whole records


def claimed_equal(flat: Mapping[str, Any], structure: str | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield each further name that a record gives to one object: (name, the tensor that `unflatten` uses, its own
    tensor).

    Raise CorruptError for a malformed record.
    """
    if structure is None or '"is"' not in structure:
        return
    first: dict[int, str] = {}
    for leaf, implied in tensors_of(parse(structure)):
        if "dropped" not in leaf and type(leaf.get("is")) is int:
            name = name_of(leaf, implied)
            known = first.setdefault(leaf["is"], name)
            if known != name and known in flat and name in flat:
                yield name, flat[known], flat[name]


def remap(structure: str | None, renames: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> str | None:
    """Return the record for renamed tensors: first apply `renames` {old: new}, then `aliases` {removed: kept} to the
    new names. Names in neither stay.

    Keys of the tree are not names, and stay. None stays None: a plain dict under new names is a plain dict; call
    `plain_record` first to keep its keys. Raise CorruptError for a malformed record.
    """
    if structure is None or not (aliases or any(old != new for old, new in renames.items())):
        return structure
    record = parse(structure)
    for leaf, implied in tensors_of(record):
        if "dropped" in leaf:
            continue
        old = name_of(leaf, implied)
        new = renames.get(old, old)
        facts = {key: value for key, value in leaf.items() if key != "name"}
        leaf.clear()
        new = (aliases or {}).get(new, new)
        if new != implied:
            leaf["name"] = new
        leaf.update(facts)
    return dump(record.root, record.nodes, record.storages)


def classes(structure: str | None) -> frozenset[str]:
    """Return the classes and functions that a record names, those of tensors included."""
    if structure is None:
        return frozenset()
    record = parse(structure)
    kinds = {str(leaf["kind"]) for leaf, _ in tensors_of(record) if "kind" in leaf}
    stack = [record.root, *record.nodes]
    while stack:
        node = stack.pop()
        if type(node) is list and node[:1] == ["global"]:
            kinds.add(".".join(map(str, node[1:])))
        elif type(node) is list:
            stack.extend(node)
    return frozenset(kinds.union(node for node in record.nodes if type(node) is str))


def tensor_names(structure: str) -> frozenset[str]:
    """Return the names that a record has for tensors."""
    return frozenset(name_of(leaf, implied) for leaf, implied in tensors_of(parse(structure)) if "dropped" not in leaf)


def plain_record(names: Iterable[str]) -> str:
    """Return the record of a plain dict of tensors with these keys, in this order."""
    return dump(["dict", *chain.from_iterable(zip(names, repeat({})))], [], [])


# ------------------------------------------------------------------------------------------------------------ checks


def corrupt(reason: str) -> NoReturn:
    raise CorruptError(f"The structure record is malformed: {reason}.", "It was damaged, or changed by hand.")


def expect(condition: object, reason: str) -> None:
    """Raise CorruptError for `reason` unless `condition` holds.

    A reason that has to be made, for each of a million tensors, costs more than most conditions: there, ask first, and
    call `corrupt`.
    """
    if not condition:
        corrupt(reason)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
