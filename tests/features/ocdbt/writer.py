"""Writes databases of OCDBT, byte by byte, as nobody else may: sound ones, and any that lie."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from features.compressed.packings import crc32c, packed

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE
FILE = "d/x"
IDENTITY = bytes(range(16))
# A value that lies in a data file: its number in the table, its offset and its length.
Elsewhere = tuple[int, int, int]


def varint(number: int) -> bytes:
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def column(numbers: Iterable[int]) -> bytes:
    return b"".join(map(varint, numbers))


def frame(
    magic: int,
    body: bytes,
    *,
    version: int = 0,
    compression: int = 0,
    length: int | None = None,
    crc: int | None = None,
) -> bytes:
    if compression == 1:
        body = packed(body)
    size = 14 + len(body) + 4 if length is None else length
    head = struct.pack(">I", magic) + struct.pack("<Q", size) + bytes([version, compression]) + body
    return head + struct.pack("<I", crc32c(head) if crc is None else crc)


def words(each: Sequence[bytes], cuts: Sequence[int] | None = None, prefixes: Sequence[int] | None = None) -> bytes:
    """Words in full, or by how much of the one before each begins with."""
    before = list(prefixes or [0] * len(each))
    rests = [word[at:] for word, at in zip(each, before, strict=True)]
    return column(before[1:]) + column(map(len, rests)) + column(cuts or ()) + b"".join(rests)


def table(paths: Sequence[str | bytes] = (FILE,), bases: Sequence[int] | None = None) -> bytes:
    names = [path if isinstance(path, bytes) else path.encode() for path in paths]
    return varint(len(names)) + words(names, bases or [0] * len(names))


def leaf(
    entries: Sequence[tuple[bytes, bytes | Elsewhere]],
    *,
    files: bytes | None = None,
    kinds: Sequence[int] | None = None,
    spelled: bytes | None = None,
    count: int | None = None,
) -> bytes:
    """The body of a leaf."""
    values = [value for _, value in entries]
    places = [value for value in values if isinstance(value, tuple)]
    return b"".join([
        b"\0",
        table() if files is None else files,
        varint(len(entries) if count is None else count),
        words([key for key, _ in entries]) if spelled is None else spelled,
        column(value[2] if isinstance(value, tuple) else len(value) for value in values),
        column(kinds or [int(isinstance(value, tuple)) for value in values]),
        column(place[0] for place in places),
        column(place[1] for place in places),
        *(value for value in values if isinstance(value, bytes)),
    ])  # fmt: skip


def inner(children: Sequence[tuple[bytes, int, int, int]], height: int = 1, cuts: Sequence[int] | None = None) -> bytes:
    """The body of an inner node; a child is its first key, offset, length and number of keys."""
    count = len(children)
    return b"".join([
        bytes([height]),
        table(),
        varint(count),
        words([key for key, *_ in children], cuts or [0] * count),
        column([0] * count),
        *(column(child[at] for child in children) for at in (1, 2, 3)),
        column([0] * count),
        column([0] * count),
    ])  # fmt: skip


def manifest(
    root: tuple[int, int, int] = (0, 0, 0),
    *,
    keys: int = 1,
    height: int = 0,
    kind: int = 0,
    arity: int = 4,
    files: bytes | None = None,
    generations: Sequence[int] = (1,),
    identity: bytes = IDENTITY,
    count: int | None = None,
    rest: bytes = b"",
) -> bytes:
    """The body of a manifest; the root is the number of its data file, offset and length."""
    head = identity + varint(kind) + column([100, 1 << 23]) + bytes([arity]) + varint(0)
    if kind:
        return head + rest
    several = len(generations)
    return b"".join([
        head,
        table() if files is None else files,
        varint(several if count is None else count),
        column(generations),
        bytes([height] * several),
        *(column([number] * several) for number in (*root, keys, 0, 0)),
        struct.pack("<Q", 0) * several,
        varint(0),
        rest,
    ])  # fmt: skip


def database(place: Path, values: Mapping[str, bytes], *, inline: int = 1024, compression: int = 1) -> Path:
    """Write values by key, as one leaf; those of more than `inline` bytes in the data file."""
    data, entries = b"", list[tuple[bytes, bytes | Elsewhere]]()
    for key, value in sorted(values.items(), key=lambda pair: pair[0].encode()):
        entries.append((key.encode(), value if len(value) <= inline else (0, len(data), len(value))))
        data += value if len(value) > inline else b""
    return nodes(place, data, [leaf(entries)], keys=len(entries), compression=compression)


def nodes(
    place: Path, data: bytes, bodies: Sequence[bytes], *, keys: int = 1, height: int = 0, compression: int = 0
) -> Path:
    """Write a data file with `data` and nodes, of which the last is the root, and the manifest."""
    (place / "d").mkdir(parents=True, exist_ok=True)
    framed = [frame(NODE, body, compression=compression) for body in bodies]
    (place / FILE).write_bytes(data + b"".join(framed))
    root = 0, len(data) + sum(map(len, framed[:-1])), len(framed[-1])
    told = manifest(root, keys=keys, height=height)
    (place / "manifest.ocdbt").write_bytes(frame(MANIFEST, told, compression=compression))
    return place
