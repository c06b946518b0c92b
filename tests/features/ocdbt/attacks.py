"""Hostile and broken databases of OCDBT: manifests and nodes that lie."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from attacks.corpus import CORRUPT, UNSAFE, UNSUPPORTED
from features.compressed.packings import crc32c, packed
from features.ocdbt.writer import (
    FILE,
    IDENTITY,
    MANIFEST,
    NODE,
    column,
    frame,
    inner,
    leaf,
    manifest,
    nodes,
    table,
    varint,
)

HUGE = 1 << 40


class Attack(NamedTuple):
    """A change of a sound database in a directory, and the exit code of its refusal."""

    file: str
    why: str
    exit: int
    change: Callable[[Path], object]


HOSTILE: list[Attack] = []


def _add(exit_code: int, file: str, why: str, change: Callable[[Path], object]) -> None:
    HOSTILE.append(Attack(file, why, exit_code, change))


# -------------------------------------------------------------------------------------------------------- manifests


def _framed(body: bytes) -> bytes:
    """A manifest whose body is said to be compressed."""
    made = frame(MANIFEST, body)
    head = made[:13] + b"\1" + made[14:-4]
    return head + struct.pack("<I", crc32c(head))


def _manifest(exit_code: int, file: str, why: str, data: bytes) -> None:
    _add(exit_code, f"manifest_{file}", why, lambda place: (place / "manifest.ocdbt").write_bytes(data))


def _told(**told: Any) -> bytes:
    return frame(MANIFEST, manifest(**told))


def _of(path: str | bytes, base: int = 0) -> bytes:
    return _told(root=(0, 0, 50), files=table([path], [base]))


_manifest(CORRUPT, "empty", "a manifest without a byte", b"")
_manifest(CORRUPT, "large", "a manifest of 5 MB", _told(rest=bytes(5 << 20)))
_manifest(CORRUPT, "older", "2^40 older versions", frame(MANIFEST, manifest()[:-1] + varint(HUGE)))
_manifest(CORRUPT, "magic", "a manifest that begins as a node", frame(NODE, manifest()))
_manifest(CORRUPT, "longer", "a manifest that says it is longer", frame(MANIFEST, manifest(), length=HUGE))
_manifest(CORRUPT, "shorter", "a manifest that says it is shorter", frame(MANIFEST, manifest(), length=20))
_manifest(CORRUPT, "crc", "a manifest with another checksum", frame(MANIFEST, manifest(), crc=1))
_manifest(UNSUPPORTED, "version", "a manifest of version 1", frame(MANIFEST, manifest(), version=1))
_manifest(UNSUPPORTED, "compression", "a manifest compressed otherwise", frame(MANIFEST, manifest(), compression=7))
_manifest(UNSUPPORTED, "kind", "a manifest of kind 2", _told(kind=2))
_manifest(CORRUPT, "numbered", "numbered manifests of which there is none", _told(kind=1))
_manifest(CORRUPT, "none", "a database of no version", _told(generations=()))
_manifest(CORRUPT, "order", "versions that are not in order", _told(generations=(2, 1)))
_manifest(CORRUPT, "generation", "a version of generation 0", _told(generations=(0,)))
_manifest(CORRUPT, "arity", "a tree of versions of 2^0 branches", _told(arity=0))
_manifest(CORRUPT, "count", "2^40 versions", _told(count=HUGE))
_manifest(CORRUPT, "rest", "bytes after the end of a manifest", _told(rest=b"abc"))
_manifest(CORRUPT, "table", "a root in a data file that is not in the table", _told(root=(9, 0, 50)))
_manifest(CORRUPT, "end", "a root beyond the end of its file", _told(root=(0, 1 << 62, 1 << 62)))
_manifest(CORRUPT, "number", "a number without an end", frame(MANIFEST, IDENTITY + b"\xff" * 40))
_manifest(CORRUPT, "height", "a root of height 200", _told(root=(0, 0, 50), height=200))
_manifest(UNSAFE, "up", "a data file above the step", _of("../../secret"))
_manifest(UNSAFE, "absolute", "a data file by an absolute path", _of("/etc/passwd"))
_manifest(UNSAFE, "url", "a data file that is a URL", _of("http://localhost/x"))
_manifest(UNSAFE, "nul", "a data file with a NUL in its name", _of("d/\0x"))
_manifest(UNSAFE, "base", "a data file above the step, by its base", _of("d/../../../x", base=2))
_manifest(CORRUPT, "text", "a data file whose path is not UTF-8", _of(b"d/\xff"))
_manifest(CORRUPT, "lacking", "a data file that is not there", _of("d/gone"))
_manifest(CORRUPT, "long_base", "a base that is longer than the path", _of(FILE, base=50))
_manifest(
    CORRUPT, "files", "a manifest of 2^19 data files", _told(files=varint(1 << 19) + bytes(3 * (1 << 19) - 1))
)  # fmt: skip
_manifest(
    CORRUPT, "prefix", "a path that begins with more than the one before it has",
    _told(files=varint(2) + column([90, 1, 1, 0, 0]) + b"ab"),
)  # fmt: skip
_add(
    CORRUPT, "manifest_bomb", "a manifest that inflates to 1 GB",
    lambda place: (place / "manifest.ocdbt").write_bytes(_framed(packed(bytes(1 << 30)))),
)  # fmt: skip
_add(
    CORRUPT, "manifest_zstd", "a manifest that is no frame of zstandard",
    lambda place: (place / "manifest.ocdbt").write_bytes(_framed(b"abcdefgh")),
)  # fmt: skip


def _numbered(place: Path, data: bytes) -> None:
    (place / "manifest.ocdbt").write_bytes(_told(kind=1))
    (place / "manifest.0000000000000001").write_bytes(data)


_add(
    CORRUPT, "numbered_other", "a numbered manifest of another database",
    lambda place: _numbered(place, _told(identity=bytes(16))),
)  # fmt: skip
_add(
    UNSUPPORTED, "numbered_again", "a numbered manifest that has numbered ones",
    lambda place: _numbered(place, _told(kind=1)),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ nodes


def _nodes(file: str, why: str, *bodies: bytes, data: bytes = b"", **told: Any) -> None:
    _add(CORRUPT, f"node_{file}", why, lambda place: nodes(place, data, bodies, **told))


def _leaf(*values: tuple[bytes, Any], **told: Any) -> bytes:
    return leaf(values, **told)


_ONE = (b"a", b"1")
_SIZE = len(frame(NODE, _leaf(_ONE)))
_LOOP = len(frame(NODE, inner([(b"a", 0, 60, 1)])))
_nodes("itself", "a node that is its own child", inner([(b"a", 0, _LOOP, 1)]), height=1)
_nodes(
    "twice",
    "two children that are one",
    _leaf(_ONE),
    inner([(b"a", 0, _SIZE, 1), (b"b", 0, _SIZE, 1)]),
    keys=2,
    height=1,
)
_nodes(
    "deep", "a child that is as high as its parent", inner([(b"a", 0, 60, 1)]), inner([(b"a", 0, _LOOP, 1)]), height=1
)
_nodes("high", "a leaf where the manifest says height 3", _leaf(_ONE), height=3)
_nodes("keys", "a node that has fewer keys than it is said to", _leaf(_ONE), keys=HUGE)
_nodes("below", "children that have fewer keys", _leaf(_ONE), inner([(b"a", 0, _SIZE, 1)]), keys=2, height=1)
_nodes("order", "keys that are not in order", _leaf((b"b", b"1"), (b"a", b"2")), keys=2)
_nodes("same", "a key twice", _leaf(_ONE, _ONE), keys=2)
_nodes("text", "a key that is not UTF-8", _leaf((b"\xff", b"1")))
_nodes("kind", "a value of kind 2", _leaf(_ONE, kinds=[2]))
_nodes("end", "a value beyond the end of its file", _leaf((b"a", (0, 1 << 62, 1 << 62))))
_nodes("past", "a value that begins in its file, and ends behind it", _leaf((b"a", (0, 0, 1 << 20))))
_nodes("table", "a value in a data file that is not in the table", _leaf((b"a", (5, 0, 1))))
_nodes("rest", "bytes after the end of a node", _leaf(_ONE) + b"x")
_nodes("count", "2^40 keys", _leaf(_ONE, count=HUGE))
_nodes("cut", "a value that is longer than the node", _leaf(_ONE)[:-1])
_nodes(
    "prefix", "a key that begins with more than the one before it has", _leaf(_ONE, spelled=column([1 << 20]) + b"a")
)
_nodes("overlap", "values that overlap", _leaf((b"a", (0, 0, 9)), (b"b", (0, 5, 9))), data=bytes(20), keys=2)
_nodes(
    "words", "keys that are spelled to 16 GB", _leaf(*((b"", b""),) * 65536, spelled=b"".join([
        column([0x3FFF] * 65535), column([0x3FFF] + [0] * 65535), b"a" * 0x3FFF,
    ])), keys=65536,
)  # fmt: skip
_nodes("bomb", "a node that inflates without end", _leaf((b"a", bytes(1 << 27))), compression=1)
_nodes(
    "first", "a child whose first key comes before the one that leads to it", _leaf(_ONE), inner([(b"b", 0, _SIZE, 1)]),
    height=1,
)  # fmt: skip
_nodes(
    "last", "a child whose last key belongs to the next one", _leaf(_ONE, (b"c", b"1")), _leaf((b"d", b"1")),
    inner([(b"a", 0, _SIZE + 6, 2), (b"b", _SIZE + 6, _SIZE, 1)]), keys=3, height=1,
)  # fmt: skip
_nodes("void", "a leaf without a key", _leaf(), keys=0)
_VOID, _PAIR = _leaf(), _leaf(_ONE, (b"c", b"1"))
_nodes(
    "void_child", "a child without a key", _VOID, _PAIR,
    inner([(b"0", 0, len(frame(NODE, _VOID)), 0), (b"a", len(frame(NODE, _VOID)), len(frame(NODE, _PAIR)), 2)]),
    keys=2, height=1,
)  # fmt: skip
_nodes("empty", "children without keys", inner([(b"a", 0, 0, 0), (b"b", 0, 0, 0)]), keys=0, height=1)


def _spelled(at: int) -> bytes:
    """A leaf of 1,000 keys of 16,000 bytes that differ in their last four."""
    first = b"%d" % at + b"a" * 16_000
    rests = [first + b"0000", *(b"%04d" % number for number in range(1, 1000))]
    prefixes, suffixes = column([len(first)] * 999), column(map(len, rests))
    return _leaf(*((b"", b""),) * 1000, spelled=prefixes + suffixes + b"".join(rests))


def _spell(place: Path) -> None:
    leaves = [_spelled(at) for at in range(5)]
    sizes = [len(frame(NODE, body, compression=1)) for body in leaves]
    starts = [sum(sizes[:at]) for at in range(5)]
    children = [(b"%d" % at, start, size, 1000) for at, (start, size) in enumerate(zip(starts, sizes, strict=True))]
    nodes(place, b"", [*leaves, inner(children)], keys=5000, height=1, compression=1)


def _inherit(place: Path) -> None:
    """50 nodes above one another, each with 16,000 bytes of the prefix of 1,000 keys: 800 MB."""
    part = b"a" * 16_000
    bodies, sizes = [_leaf(*((b"%04d" % number, b"") for number in range(1000)))], list[int]()
    for height in range(1, 51):
        sizes.append(len(frame(NODE, bodies[-1], compression=1)))
        bodies.append(inner([(part, sum(sizes[:-1]), sizes[-1], 1000)], height, [len(part)]))
    nodes(place, b"", bodies, keys=1000, height=50, compression=1)


_add(CORRUPT, "node_inherited", "small nodes whose keys inherit a prefix of 800 kB", _inherit)
_add(CORRUPT, "node_spelled", "small leaves whose keys are spelled to 80 MB", _spell)
_nodes("away", "a value in a file of another directory", _leaf((b"a", (1, 0, 1)), files=table([FILE, "d/y"])))


def _crc(place: Path) -> None:
    data = bytearray((place / FILE).read_bytes())
    data[-6] ^= 1
    (place / FILE).write_bytes(data)


_add(CORRUPT, "node_crc", "a node with a bit that has changed", _crc)


def _in_two_frames(place: Path) -> None:
    body = manifest()
    (place / "manifest.ocdbt").write_bytes(_framed(packed(body[:9]) + packed(body[9:])))


_add(CORRUPT, "manifest_frames", "a manifest in two frames of zstandard", _in_two_frames)
