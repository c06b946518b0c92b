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
from ckptconv.features.ocdbt.wire import MANIFEST, NODE, Body
from ckptconv.storage.inside import check_inside
from ckptconv.tensors.moves import File

NAME, _NUMBERED = "manifest.ocdbt", re.compile(r"manifest\.[0-9a-f]{16}")
# The most bytes of a manifest, and of a node; the most keys; the greatest height.
_MOST_MANIFEST, _MOST_NODE, _MOST_KEYS, _DEEPEST = 4 << 20, 100_000_000, 1 << 22, 64
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
        level, pairs, seen = self._root(), list[tuple[bytes, Value]](), set[tuple[str, int]]()
        packed = memory = 0
        while level:
            seen.update((node.value.file.path, node.value.offset) for node in level)
            packed, count = packed + sum(node.value.length for node in level), sum(node.keys for node in level)
            if packed > _MOST_NODES or count > _MOST_KEYS:
                raise LimitError(f"{self._where} has {count} keys, in nodes of {packed} bytes: too many.")
            below: list[_Node] = []
            for node, data in zip(level, self._files.contents([node.value for node in level]), strict=True):
                body = Body(node.value.file, node.value.offset, data, NODE)
                if body.fixed(1) != node.height:
                    raise body.wrong(f"it is of another height than {node.height}, which leads to it")
                if node.height:
                    below += self._children(body, node)
                else:
                    pairs += self._entries(body, node)
                memory += body.nbytes
                if memory > _GROWTH * packed + _ROOM:
                    raise LimitError(f"{self._where} has nodes of {packed} bytes, which unpack to {memory}: too many.")
            level = below
            twice = [node.value for node in level if (node.value.file.path, node.value.offset) in seen]
            if twice or len({node.value for node in level}) < len(level):
                raise damaged(f"{self._where}: a node leads to one that another leads to: it is damaged.")
        try:
            return {key.decode(): value for key, value in pairs}
        except UnicodeDecodeError as error:
            raise damaged(f"{self._where}: its key {error.object[:100]!r} is not UTF-8.") from None

    def _root(self) -> list[_Node]:
        """Return the root of the newest version; none if it is empty."""
        body, kind, identity = self._manifest(NAME)
        if kind == 1:
            body.end()
            names = [name for name in self._files.place.names if _NUMBERED.fullmatch(name)]
            if not names:
                raise CorruptError(f"{self._where} has its versions in numbered manifests, but these are missing.")
            body, kind, its_identity = self._manifest(max(names))
            if its_identity != identity:
                raise body.wrong(f"it belongs to another database than {NAME}")
        if kind:
            raise UnsupportedError(f"{body.where} is a manifest of kind {kind}, which is not known.")
        table, count = body.table(""), body.count()
        generations, heights = body.column(count), [*body.take(count)]
        files, offsets, lengths, keys, _, _ = (body.column(count) for _ in range(6))
        body.take(8 * count)
        older = body.count()
        body.column(5 * older)
        body.take(9 * older)
        body.end()
        if not count or sorted({0, *generations})[1:] != generations:
            raise body.wrong(f"its versions are not in order: {generations[:8]}")
        if not lengths[-1]:
            return []
        return [self._node(body, table, (files[-1], offsets[-1], lengths[-1]), heights[-1], keys[-1])]

    def _manifest(self, name: str) -> tuple[Body, int, bytes]:
        """Return the part of a manifest after its heading, its kind, and its identity."""
        data, file = self._files.whole(name, _MOST_MANIFEST), self._files.find(name)
        assert data is not None, name  # it is listed
        assert file is not None, name
        body = Body(file, 0, data, MANIFEST, _MOST_MANIFEST)
        identity, kind, _ = body.take(16), body.varint(), body.column(2)
        arity, compression = body.fixed(1), body.varint()
        if arity not in _ARITIES:
            raise body.wrong(f"its versions are in a tree of 2^{arity} branches")
        if compression > 1:
            raise UnsupportedError(f"{file.path} compresses nodes in way {compression}, which is not known.")
        body.take(4 * compression)
        return body, kind, identity

    def _place(self, body: Body, table: list[tuple[str, str]], index: int, offset: int, length: int) -> Value:
        """Return the place to which `body` refers. Raise CorruptError if it does not exist."""
        if index >= len(table):
            raise body.wrong(f"it refers to data file {index} of {len(table)}")
        path = table[index][0]
        if path not in self._known:
            check_inside(path, body.where, self._files.place.path)
            file = self._files.find(path)
            if file is None:
                raise CorruptError(
                    f"{self._files.place} lacks {path}, which {body.where} names.", "Copy the whole directory."
                )
            self._known[path] = file
        file = self._known[path]
        if offset + length > file.size:
            raise damaged(
                f"{file.path} has {file.size} bytes, and {length} bytes are said to begin at byte {offset}: it was cut "
                "short."
            )
        return Value(file, offset, length)

    def _node(
        self, body: Body, table: list[tuple[str, str]], place: tuple[int, int, int], height: int, *facts: Any
    ) -> _Node:
        """Return a node by its place: the number of its data file, its offset, and its length."""
        if place[2] > _MOST_NODE or height > _DEEPEST:
            raise body.wrong(f"it leads to a node of {place[2]} bytes, of height {height}")
        return _Node(self._place(body, table, *place), table[place[0]][1], height, *facts)

    def _keys(self, body: Body, node: _Node, count: int, *, cut: bool) -> tuple[list[bytes], list[int]]:
        """Return the keys in a node, and the lengths of the prefixes that are cut from them below it."""
        words, cuts = body.words(count, cut=cut)
        keys = [node.prefix + word for word in words]
        is_within = not keys or (node.first <= keys[0] and (node.stop is None or keys[-1] < node.stop))
        if not is_within or keys != sorted({*keys}):
            raise body.wrong(f"its keys are not in order, or belong to another node: {keys[0][:100]!r}, and others")
        return keys, [len(node.prefix) + length for length in cuts]

    def _entries(self, body: Body, node: _Node) -> Iterator[tuple[bytes, Value]]:
        """Yield the keys in a leaf, and their values."""
        table, count = body.table(node.base), body.count()
        if count != node.keys:
            raise body.wrong(f"it has {count} keys, and what leads to it says {node.keys}")
        keys, _ = self._keys(body, node, count, cut=False)
        lengths, kinds = body.column(count), body.column(count)
        if any(kind > 1 for kind in kinds):
            raise body.wrong("a value is neither in it nor in a file")
        files, offsets = iter(body.column(sum(kinds))), iter(body.column(sum(kinds)))
        for key, length, kind in zip(keys, lengths, kinds, strict=True):
            if kind:
                value = self._place(body, table, next(files), next(offsets), length)
            else:
                value = Value(body.file, body.start + body.at, length, body.take(length))
            yield key, value
        body.end()

    def _children(self, body: Body, node: _Node) -> Iterator[_Node]:
        """Yield the references in an inner node."""
        table, count = body.table(node.base), body.count()
        if count > node.keys:
            raise body.wrong(f"it leads to {count} nodes with {node.keys} keys")
        keys, cuts = self._keys(body, node, count, cut=True)
        files, offsets, lengths, numbers, _, _ = (body.column(count) for _ in range(6))
        body.end()
        if sum(numbers) != node.keys:
            raise body.wrong(f"it has {sum(numbers)} keys below it, and what leads to it says {node.keys}")
        places = zip(files, offsets, lengths, strict=True)
        for place, number, key, cut, stop in zip(places, numbers, keys, cuts, [*keys[1:], node.stop], strict=True):
            yield self._node(body, table, place, node.height - 1, number, key[:cut], key, stop)


def _check_apart(values: Iterable[Value]) -> None:
    """Raise CorruptError if two values overlap. They may be the same bytes."""
    places = sorted({(value.file.path, value.offset, value.offset + value.length) for value in values if value.length})
    for (path, start, stop), (next_path, begin, _) in itertools.pairwise(places):
        if path == next_path and begin < stop:
            raise damaged(f"{path}: the values at bytes {start} and {begin} overlap: it is damaged.")
