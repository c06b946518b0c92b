"""Reads the keys of a database of OCDBT, and the places of their values. No value in a file is read.

Source: tensorstore/kvstore/ocdbt/format/{manifest,version_tree,btree}.cc. The manifest names the root of the newest
version. It is a B+tree of nodes in data files: leaves have keys, small values, and the places of larger ones.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptconv.errors import CorruptError, LimitError, UnsupportedError, damaged
from ckptconv.features.orbax.files import Files, Value
from ckptconv.features.orbax.wire import MANIFEST, NODE, Body, first_unordered
from ckptconv.storage.inside import check_inside
from ckptconv.tensors.moves import File

NAME, _NUMBERED = "manifest.ocdbt", re.compile(r"manifest\.[0-9a-f]{16}")
# The most bytes of a manifest, of a node, and of all nodes together; the most keys; the greatest height.
_MOST_MANIFEST, _MOST_NODE, _MOST_NODES, _MOST_KEYS, _DEEPEST = 16 << 20, 64 << 20, 256 << 20, 1 << 22, 64


class _Node(NamedTuple):
    """A reference to a node: its place, the directory from which paths in it begin, its height, the number of keys in
    it or below it, and their common prefix."""

    value: Value
    base: str
    height: int
    keys: int
    prefix: bytes


class Database:
    """The keys of a database, with the places of their values."""

    def __init__(self, files: Files) -> None:
        self._files, self._where = files, str(files.place.join(NAME))
        self._known: dict[str, File] = {}
        self._values = self._read()
        self._names = sorted(self._values)
        _check_apart(self._values.values())

    def get(self, key: str) -> Value | None:
        return self._values.get(key)

    def count(self, prefix: str) -> int:
        return bisect.bisect(self._names, f"{prefix}\U0010ffff") - bisect.bisect_left(self._names, prefix)

    def names(self) -> Iterator[str]:
        yield from self._names

    def _read(self) -> dict[str, Value]:
        level, pairs, seen, size = self._root(), list[tuple[bytes, Value]](), set[tuple[str, int]](), 0
        while level:
            seen.update((node.value.file.path, node.value.offset) for node in level)
            size, count = size + sum(node.value.length for node in level), sum(node.keys for node in level)
            if size > _MOST_NODES or count > _MOST_KEYS:
                raise LimitError(f"{self._where} has {count} keys, in nodes of {size} bytes: too many.")
            below: list[_Node] = []
            for node, data in zip(level, self._files.contents([node.value for node in level]), strict=True):
                body = Body(node.value.file, node.value.offset, data, NODE)
                if body.fixed(1) != node.height:
                    raise body.wrong(f"it is of another height than {node.height}, which leads to it")
                if node.height:
                    below += self._children(body, node)
                else:
                    pairs += self._entries(body, node)
            level = below
            twice = [node.value for node in level if (node.value.file.path, node.value.offset) in seen]
            if twice or len({node.value for node in level}) < len(level):
                raise damaged(f"{self._where}: a node leads to one that another leads to: it is damaged.")
        odd = first_unordered([key for key, _ in pairs])
        if odd is not None:
            raise damaged(f"{self._where}: its keys are not in order: {odd[:100]!r} comes after a later one.")
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
        if not count or sorted({*generations}) != generations:
            raise body.wrong(f"its versions are not in order: {generations[:8]}")
        if not lengths[-1]:
            return []
        return [self._node(body, table, files[-1], offsets[-1], lengths[-1], heights[-1], keys[-1], b"")]

    def _manifest(self, name: str) -> tuple[Body, int, bytes]:
        """Return the part of a manifest after its heading, its kind, and its identity."""
        data, file = self._files.whole(name, _MOST_MANIFEST), self._files.find(name)
        assert data is not None, name  # it is listed
        assert file is not None, name
        body = Body(file, 0, data, MANIFEST)
        identity, kind, _ = body.take(16), body.varint(), body.column(2)
        body.take(1)
        compression = body.varint()
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
        self, body: Body, table: list[tuple[str, str]], index: int, offset: int, length: int, height: int, keys: int,
        prefix: bytes,
    ) -> _Node:  # fmt: skip
        value = self._place(body, table, index, offset, length)
        if length > _MOST_NODE or height > _DEEPEST:
            raise body.wrong(f"it leads to a node of {length} bytes, of height {height}")
        return _Node(value, table[index][1], height, keys, prefix)

    def _entries(self, body: Body, node: _Node) -> Iterator[tuple[bytes, Value]]:
        """Yield the keys in a leaf, and their values."""
        table, count = body.table(node.base), body.count()
        if count != node.keys:
            raise body.wrong(f"it has {count} keys, and what leads to it says {node.keys}")
        keys, _ = body.words(count, cut=False)
        lengths, kinds = body.column(count), body.column(count)
        if any(kind > 1 for kind in kinds):
            raise body.wrong("a value is neither in it nor in a file")
        files, offsets = iter(body.column(sum(kinds))), iter(body.column(sum(kinds)))
        for key, length, kind in zip(keys, lengths, kinds, strict=True):
            if kind:
                value = self._place(body, table, next(files), next(offsets), length)
            else:
                value = Value(body.file, body.start + body.at, length, body.take(length))
            yield node.prefix + key, value
        body.end()

    def _children(self, body: Body, node: _Node) -> Iterator[_Node]:
        """Yield the references in an inner node."""
        table, count = body.table(node.base), body.count()
        words, cuts = body.words(count, cut=True)
        files, offsets, lengths, keys, _, _ = (body.column(count) for _ in range(6))
        body.end()
        if sum(keys) != node.keys:
            raise body.wrong(f"it has {sum(keys)} keys below it, and what leads to it says {node.keys}")
        columns = zip(files, offsets, lengths, keys, words, cuts, strict=True)
        for file, offset, length, key_count, word, cut in columns:
            yield self._node(body, table, file, offset, length, node.height - 1, key_count, node.prefix + word[:cut])


def _check_apart(values: Iterable[Value]) -> None:
    """Raise CorruptError if two values overlap. They may be the same bytes."""
    places = sorted({(value.file.path, value.offset, value.offset + value.length) for value in values if value.length})
    for (path, start, stop), (next_path, begin, _) in itertools.pairwise(places):
        if path == next_path and begin < stop:
            raise damaged(f"{path}: the values at bytes {start} and {begin} overlap: it is damaged.")
