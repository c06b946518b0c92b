"""Reads structure records and their descriptions of tensors. Nothing in a record is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.storage import strict_json
from ckptconv.structure.record import NAMING, VERSION, implied_name, inner_prefix


class StructureRecord(NamedTuple):
    """A parsed record. The table and the storages are lists of the right form; the nodes are not checked."""

    root: Any
    nodes: list[Any]
    storages: list[tuple[int, str]]


def parse(structure: str) -> StructureRecord:
    """Parse a record. Raise UnsupportedError for an unknown version, CorruptError for text that is no record."""
    try:
        record = strict_json.parse(structure)
    except ValueError as error:
        corrupt(f"it cannot be read: {error}")
    if type(record) is not dict or type(record.get("version")) is not int:
        corrupt("it is not an object with a version")
    if record["version"] != VERSION:
        raise UnsupportedError(
            f"The structure record is of version {record['version']}, but only version {VERSION} is supported.",
            "Use the release of ckptconv that wrote it, or a later release.",
        )
    nodes, storages = record.get("nodes", []), record.get("storages", [])
    expect("root" in record and type(nodes) is list and type(storages) is list, "its root or a list is missing")
    for storage in storages:
        valid = type(storage) is list and len(storage) == 2 and is_count(storage[0]) and type(storage[1]) is str
        expect(valid, "a storage is not a size and a dtype")
    return StructureRecord(record["root"], nodes, storages)


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
        corrupt(f"it refers to node {index!r}, but has {len(record.nodes)} nodes")
    return record.nodes[index]


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


# ------------------------------------------------------------------------------------------------------------ checks


def corrupt(reason: str) -> NoReturn:
    raise CorruptError(f"The structure record is malformed: {reason}.", "The record was damaged, or changed by hand.")


def expect(condition: object, reason: str) -> None:
    """Raise CorruptError for `reason` unless `condition` holds.

    To build a reason for each of a million tensors costs more than most conditions: there, check first, and call
    `corrupt`.
    """
    if not condition:
        corrupt(reason)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
