"""Reads the keys of a database of OCDBT, and the places of their values. No value in a file is read.

Source: tensorstore/kvstore/ocdbt/format/{manifest,version_tree,btree}.cc. The manifest names the root of the newest
version. It is a B+tree of nodes in data files: leaves have keys, small values, and the places of larger ones.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, LimitError, UnsupportedError, damaged
from ckptconv.features.joining.values import Files, Value
from ckptconv.features.ocdbt.wire import MANIFEST, NODE, Body, Reference
from ckptconv.storage.inside import check_inside
from ckptconv.tensors.moves import File

NAME, _NUMBERED = "manifest.ocdbt", re.compile(r"manifest\.[0-9a-f]{16}")
# The most bytes of a manifest; the most keys.
_MOST_MANIFEST, _MOST_KEYS = 4 << 20, 1 << 22
# The binary logarithms of the branches of a tree of versions that tensorstore reads.
_ARITIES = range(1, 17)
# The most memory of all nodes: so many times the bytes of their files, and some more; and the most bytes in files.
_GROWTH, _ROOM, _MOST_NODES = 128, 64 << 20, 256 << 20


class _Node(NamedTuple):
    """A reference to a node: its place, the directory from which paths in it begin, its height, the number of keys in
    it or below it, and their common prefix. They begin at `first`, and end before `stop`, if that is not None."""

    value: Value
    base: str
    height: int
    keys: int
    prefix: bytes = b""
    first: bytes = b""
    stop: bytes | None = None


class Database:
    """The keys of a database, with the places of their values."""

    def __init__(self, files: Files) -> None:
        self._files, self._where = files, str(files.place.join(NAME))
        self._known: dict[str, File] = {}
        self._values = self._read()
        self._names = sorted(self._values)
        _check_apart(self._values.values())

    def under(self, name: str) -> Mapping[str, Value]:
        """Return the values whose keys begin with a name and a slash, by the rest of their keys."""
        prefix = f"{name}/" if name else ""
        start, stop = bisect.bisect_left(self._names, prefix), bisect.bisect(self._names, f"{prefix}\U0010ffff")
        return {key[len(prefix) :]: self._values[key] for key in self._names[start:stop]}

    def listed(self) -> list[str]:
        """Return all keys, in order."""
        return self._names

    def _read(self) -> dict[str, Value]:
        level, pairs = self._root(), list[tuple[bytes, Value]]()
        packed = memory = 0
        while level:
            packed, count = packed + sum(node.value.length for node in level), sum(node.keys for node in level)
            if packed > _MOST_NODES or count > _MOST_KEYS:
                raise LimitError(
                    f"{self._where} has {count} keys, in nodes of {packed} bytes; at most {_MOST_KEYS} keys and "
                    f"{_MOST_NODES} bytes are supported."
                )
            below: list[_Node] = []
            for node, data in zip(level, self._files.contents([node.value for node in level]), strict=True):
                body = Body(node.value.file, node.value.offset, data, NODE)
                keys, cuts = _keys(body, node)
                if node.height:
                    below += self._children(body, node, keys, cuts)
                else:
                    pairs += zip(keys, self._entries(body, len(keys)), strict=True)
                body.end()
                memory += body.nbytes
                if memory > _GROWTH * packed + _ROOM:
                    raise LimitError(
                        f"{self._where} has nodes of {packed} bytes, which unpack to {memory} bytes; at most "
                        f"{_GROWTH * packed + _ROOM} are supported."
                    )
            level = below
        try:
            return {key.decode(): value for key, value in pairs}
        except UnicodeDecodeError as error:
            raise damaged(f"{self._where}: its key {error.object[:100]!r} is not valid UTF-8.") from None

    def _root(self) -> list[_Node]:
        """Return the root of the newest version; none if that is empty."""
        body, kind, identity = self._manifest(NAME)
        if kind == 1:
            body.end()
            names = [name for name in self._files.place.names if _NUMBERED.fullmatch(name)]
            if not names:
                raise CorruptError(f"{self._where} stores its versions in numbered manifests, but contains none.")
            body, kind, its_identity = self._manifest(max(names))
            if its_identity != identity:
                raise body.wrong(f"it belongs to a different database than {NAME}")
        if kind:
            raise UnsupportedError(f"{body.where} is a manifest of the unknown kind {kind}.")
        body.table("")
        count = body.varint()
        generations, heights, versions = body.column(count), body.take(count), body.references(count)
        body.take(8 * count)
        older = body.varint()
        body.column(5 * older)
        body.take(9 * older)
        body.end()
        if not count or sorted({0, *generations})[1:] != generations:
            raise body.wrong(f"its versions are not in order: {generations[:8]}")
        return [self._node(body, versions[-1], heights[-1])] if versions[-1].length else []

    def _manifest(self, name: str) -> tuple[Body, int, bytes]:
        """Return the part of a manifest after its heading, its kind, and its identity."""
        data = self._files.whole(name, _MOST_MANIFEST) or b""
        body = Body(File(str(self._files.place.join(name)), len(data)), 0, data, MANIFEST, _MOST_MANIFEST)
        identity, kind, _ = body.take(16), body.varint(), body.column(2)
        arity, compression = body.fixed(1), body.varint()
        if arity not in _ARITIES:
            raise body.wrong(f"its version tree has the invalid arity 2^{arity}")
        if compression > 1:
            raise UnsupportedError(f"{body.where} has the unknown node compression {compression}.")
        body.take(4 * compression)
        return body, kind, identity

    def _place(self, body: Body, index: int, offset: int, length: int) -> Value:
        """Return the place to which `body` refers. Raise CorruptError if it does not exist."""
        if index >= len(body.files):
            raise body.wrong(f"it refers to data file {index}, but lists {len(body.files)} data files")
        path, _ = body.files[index]
        if path not in self._known:
            check_inside(path, body.where, self._files.place.path)
            file = self._files.find(path)
            if file is None:
                raise CorruptError(
                    f"{self._files.place} does not contain {path}, to which {body.where} refers.",
                    "Copy the whole directory.",
                )
            self._known[path] = file
        file = self._known[path]
        if offset + length > file.size:
            raise damaged(
                f"{file.path} has {file.size} bytes, but should contain {length} bytes from byte {offset} on: it was "
                "cut short."
            )
        return Value(file, offset, length)

    def _node(self, body: Body, to: Reference, height: int, *keys: Any) -> _Node:
        """Return the node to which `body` refers. `keys` are the prefix and the limits of its keys."""
        return _Node(self._place(body, *to[:3]), body.files[to.file][1], height, to.keys, *keys)

    def _entries(self, body: Body, count: int) -> Iterator[Value]:
        """Yield the values in a leaf."""
        lengths, kinds = body.column(count), body.column(count)
        if any(kind > 1 for kind in kinds):
            raise body.wrong("a value is stored neither in the node nor in a file")
        files, offsets = iter(body.column(sum(kinds))), iter(body.column(sum(kinds)))
        for length, kind in zip(lengths, kinds, strict=True):
            if kind:
                yield self._place(body, next(files), next(offsets), length)
            else:
                yield Value(body.file, body.start + body.at, length, body.take(length))

    def _children(self, body: Body, node: _Node, keys: list[bytes], cuts: list[int]) -> Iterator[_Node]:
        """Yield the nodes to which an inner node leads. `cuts` are the lengths of the prefixes of their keys."""
        children = body.references(len(keys))
        count = sum(child.keys for child in children)
        if count != node.keys:
            raise body.wrong(f"its children have {count} keys, but its parent records {node.keys}")
        for child, key, cut, stop in zip(children, keys, cuts, [*keys[1:], node.stop], strict=True):
            yield self._node(body, child, node.height - 1, key[:cut], key, stop)


def _keys(body: Body, node: _Node) -> tuple[list[bytes], list[int]]:
    """Read a node up to its keys. Return these, and the lengths of the prefixes that the nodes below share.

    Raise CorruptError if it is not the node that another leads to.
    """
    if body.fixed(1) != node.height:
        raise body.wrong(f"its height is not {node.height}, which its parent records")
    body.table(node.base)
    count = body.varint()
    if not count or (count > node.keys if node.height else count != node.keys):
        raise body.wrong(f"it has {count} entries, but its parent records {node.keys} keys")
    keys, cuts = body.words(count, node.prefix, cut=node.height > 0)
    is_within = node.first <= keys[0] and (node.stop is None or keys[-1] < node.stop)
    if not is_within or keys != sorted({*keys}):
        raise body.wrong(f"its keys are out of order or belong to another node: {keys[0][:100]!r}, and others")
    return keys, cuts


def _check_apart(values: Iterable[Value]) -> None:
    """Raise CorruptError if two values overlap. They may be the same bytes."""
    places = sorted({(value.file.path, value.offset, value.offset + value.length) for value in values if value.length})
    for (path, start, stop), (next_path, begin, _) in itertools.pairwise(places):
        if path == next_path and begin < stop:
            raise damaged(f"{path} is damaged: the values at bytes {start} and {begin} overlap.")
