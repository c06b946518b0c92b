"""Writes databases of OCDBT and steps of Orbax, byte by byte, as nobody else may: sound ones, and any that lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE
FILE = "d/x"
IDENTITY = bytes(range(16))
# A value that lies in a data file: its number in the table, its offset and its length.
Elsewhere = tuple[int, int, int]


def crc32c(data: bytes) -> int:
    """Bit by bit, by the polynomial alone."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


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


def packed(data: bytes, level: int = 1) -> bytes:
    """A frame of zstandard that does not tell the size of its content."""
    made = zstandard.ZstdCompressor(level=level).compressobj()
    return made.compress(data) + made.flush()


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


def zarray(array: np.ndarray[Any, Any], cut: Sequence[int], /, **changed: Any) -> bytes:
    """The description of an array in zarr 2, in chunks of the shape `cut`."""
    told = {
        "chunks": list(cut),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": array.dtype.str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
    return json.dumps({**told, **changed}).encode()


def zarr3(array: np.ndarray[Any, Any], cut: Sequence[int], packing: Sequence[Any], /, **changed: Any) -> bytes:
    """The description of an array in zarr 3."""
    told = {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(cut)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": list(packing),
        "data_type": array.dtype.name,
        "fill_value": 0,
        "node_type": "array",
        "shape": list(array.shape),
        "zarr_format": 3,
    }
    return json.dumps({**told, **changed}).encode()


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD, CRC32C = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}, {"name": "crc32c"}


def sharding(inner_shape: Sequence[int], codecs: Sequence[Any], **changed: Any) -> dict[str, Any]:
    told = {"chunk_shape": list(inner_shape), "codecs": list(codecs), "index_codecs": [LITTLE, CRC32C]}
    return {"name": "sharding_indexed", "configuration": {**told, **changed}}


def shard(chunks: Sequence[bytes | None], index: Sequence[tuple[int, int]] | None = None) -> bytes:
    """A shard with its index at its end; None is a chunk that is not there."""
    places, data = [], b""
    for chunk in chunks:
        places.append((len(data), len(chunk)) if chunk is not None else ((1 << 64) - 1,) * 2)
        data += chunk or b""
    numbers = b"".join(struct.pack("<QQ", *place) for place in index or places)
    return data + numbers + struct.pack("<I", crc32c(numbers))


def entry(*keys: str | int, **value: Any) -> dict[str, Any]:
    """An entry of a tree, by its keys and indices."""
    return {
        "key_metadata": [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, **value},
    }


def metadata(*entries: Mapping[str, Any]) -> str:
    """The text of _METADATA."""
    told = {repr(tuple(key["key"] for key in each["key_metadata"])): each for each in entries}
    return json.dumps({"tree_metadata": told, "use_zarr3": False})


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


def chunked(
    name: str, array: np.ndarray[Any, Any], chunks: Sequence[int], *, compressed: bool = True, **changed: Any
) -> dict[str, bytes]:
    """The keys and values of an array in zarr 2, whose chunks at the edge are padded."""
    grid = [-(-extent // size) for extent, size in zip(array.shape, chunks, strict=True)]
    whole = np.full([count * size for count, size in zip(grid, chunks, strict=True)], 7, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    compressor = {"id": "zstd", "level": 1} if compressed else None
    values = {f"{name}/.zarray": zarray(array, chunks, **{"compressor": compressor, **changed})}
    for cell in np.ndindex(*grid):
        box = tuple(slice(at * size, (at + 1) * size) for at, size in zip(cell, chunks, strict=True))
        data = np.ascontiguousarray(whole[box]).tobytes()
        values[f"{name}/{'.'.join(map(str, cell)) or '0'}"] = packed(data) if compressed else data
    return values


def step(place: Path, arrays: Mapping[str, np.ndarray[Any, Any]], *, compressed: bool = True, rows: int = 64) -> Path:
    """A step with these arrays, each in chunks of so many rows."""
    values: dict[str, bytes] = {}
    for name, array in arrays.items():
        values |= chunked(name, array, (min(rows, array.shape[0]), *array.shape[1:]), compressed=compressed)
    database(place, values)
    (place / "_METADATA").write_text(metadata(*(entry(*name.split(".")) for name in arrays)))
    return place
