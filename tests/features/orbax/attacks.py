"""Hostile and broken steps of Orbax: manifests, nodes, descriptions of arrays, and trees that lie."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attacks.corpus import CORRUPT, UNSAFE, UNSUPPORTED
from attacks.directories import Directory
from features.orbax.writer import (
    CRC32C,
    FILE,
    IDENTITY,
    LITTLE,
    MANIFEST,
    NODE,
    column,
    crc32c,
    database,
    entry,
    frame,
    inner,
    leaf,
    manifest,
    metadata,
    nodes,
    packed,
    shard,
    sharding,
    step,
    table,
    varint,
    zarr3,
    zarray,
)

W = np.arange(12, dtype="f4").reshape(3, 4)
HUGE = 1 << 40


class StepAttack(Directory):
    """A directory that `convert` is asked for."""

    @property
    def command(self) -> str:
        return "convert"


STEPS: list[Directory] = []


def _add(exit_code: int, file: str, why: str, change: Callable[[Path], object]) -> None:
    """A sound step, which is changed."""

    def make(place: Path, canary: str) -> Path:
        made = step(place / "step", {"w": W}, compressed=False)
        change(made)
        return made

    STEPS.append(StepAttack(f"orbax_{file}", "Orbax", exit_code, why, make))


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


_add(CORRUPT, "node_spelled", "small leaves whose keys are spelled to 80 MB", _spell)
_nodes("away", "a value in a file of another directory", _leaf((b"a", (1, 0, 1)), files=table([FILE, "d/y"])))


def _crc(place: Path) -> None:
    data = bytearray((place / FILE).read_bytes())
    data[-6] ^= 1
    (place / FILE).write_bytes(data)


_add(CORRUPT, "node_crc", "a node with a bit that has changed", _crc)

# ----------------------------------------------------------------------------------------------------------- arrays


def _arrays(exit_code: int, file: str, why: str, values: Mapping[str, bytes]) -> None:
    _add(exit_code, f"array_{file}", why, lambda place: database(place, values))


def _second(exit_code: int, file: str, why: str, chunk: bytes = W.tobytes(), **changed: Any) -> None:
    _arrays(exit_code, file, why, {"w/.zarray": zarray(W, (3, 4), **changed), "w/0.0": chunk})


ZSTD = {"id": "zstd", "level": 1}
_arrays(CORRUPT, "json", "a description that is not JSON", {"w/.zarray": b"{"})
_arrays(CORRUPT, "deep", "a description nested 100,000 levels deep", {"w/.zarray": b"[" * 100_000})
_arrays(CORRUPT, "both", "an array of zarr 2 and of zarr 3", {"w/.zarray": b"{}", "w/zarr.json": b"{}"})
_arrays(CORRUPT, "ghost", "an array that is not there", {"v/.zarray": b"{}"})
_arrays(CORRUPT, "long", "a description of 2 MB", {"w/.zarray": b" " * (1 << 21)})
_second(CORRUPT, "no_chunk", "chunks of no element", chunks=[0, 4])
_second(CORRUPT, "axes", "chunks of other axes", chunks=[3, 4, 1])
_second(CORRUPT, "negative", "a negative extent", shape=[-3, 4])
_second(CORRUPT, "product", "a shape whose product overflows", shape=[1 << 40, 1 << 40], chunks=[1 << 39, 1 << 39])
_second(CORRUPT, "pieces", "an array cut into 10^12 chunks, of which one is there", shape=[10**6, 10**6], chunks=[1, 1])
_second(CORRUPT, "dims", "an array of 70 axes", shape=[1] * 70, chunks=[1] * 70)
_second(UNSUPPORTED, "filters", "filters", filters=[{"id": "delta"}])
_second(UNSUPPORTED, "blosc", "another compressor", compressor={"id": "blosc"})
_second(UNSUPPORTED, "zlib", "another compressor", compressor={"id": "zlib", "level": 1})
_second(UNSUPPORTED, "unnamed", "a compressor without a name", compressor={"level": 1})
_second(UNSUPPORTED, "object", "objects of Python", dtype="|O")
_second(UNSUPPORTED, "int4", "numbers of four bits", dtype="int4")
_second(UNSUPPORTED, "uint4", "counts of four bits", dtype="uint4")
_second(UNSUPPORTED, "records", "records", dtype=[["a", "<f4"]])
_second(CORRUPT, "short", "a chunk that is too short", W.tobytes()[:-4])
_second(CORRUPT, "longer", "a chunk that is too long", W.tobytes() + b"1234")
_second(CORRUPT, "inflated", "a chunk that inflates to more than it has", packed(bytes(1 << 28)), compressor=ZSTD)
_second(CORRUPT, "deflated", "a chunk that inflates to less than it has", packed(bytes(40)), compressor=ZSTD)
_second(CORRUPT, "frame", "a chunk that is no frame of zstandard", b"abc", compressor=ZSTD)
_second(CORRUPT, "order", "elements in an order that is none", order="K")
_arrays(
    UNSUPPORTED,
    "filled",
    "chunks that are not there, and are not zero",
    {"w/.zarray": zarray(W, (3, 4), fill_value=1.5)},
)


def _third(exit_code: int, file: str, why: str, codecs: list[Any], chunk: bytes, **changed: Any) -> None:
    _arrays(exit_code, file, why, {"w/zarr.json": zarr3(W, (3, 4), codecs, **changed), "w/c/0/0": chunk})


_SHARDED = [sharding((3, 2), [LITTLE])]
_HALVES = [np.ascontiguousarray(W[:, :2]).tobytes(), np.ascontiguousarray(W[:, 2:]).tobytes()]
_third(CORRUPT, "shard_crc", "a shard whose index has changed", _SHARDED, shard(_HALVES)[:-1] + b"!")
_third(CORRUPT, "shard_end", "a chunk beyond the end of its shard", _SHARDED, shard(_HALVES, [(0, 24), (1 << 62, 24)]))
_third(CORRUPT, "shard_index", "a chunk in the index of its shard", _SHARDED, shard(_HALVES, [(0, 24), (40, 24)]))
_third(CORRUPT, "shard_overlap", "chunks that overlap", _SHARDED, shard(_HALVES, [(0, 24), (12, 24)]))
_third(CORRUPT, "shard_length", "a chunk of another length", _SHARDED, shard(_HALVES, [(0, 24), (24, 20)]))
_third(CORRUPT, "shard_short", "a shard that is shorter than its index", _SHARDED, b"abc")
_LARGE = [1 << 25] * 2
_third(
    CORRUPT,
    "shard_count",
    "a shard of 2^50 chunks",
    [sharding((1, 1), [LITTLE])],
    shard(_HALVES),
    shape=_LARGE,
    chunk_grid={"name": "regular", "configuration": {"chunk_shape": _LARGE}},
)
_third(CORRUPT, "shard_cut", "chunks that do not fill their shard", [sharding((2, 3), [LITTLE])], shard(_HALVES))
_third(UNSUPPORTED, "shard_packed", "an index that is packed", [
    sharding((3, 2), [LITTLE], index_codecs=[LITTLE, {"name": "gzip"}])
], shard(_HALVES))  # fmt: skip
_third(UNSUPPORTED, "shard_shard", "shards in shards", [sharding((3, 4), _SHARDED)], shard(_HALVES))
_third(
    CORRUPT,
    "turned",
    "a transposition of no axes",
    [{"name": "transpose", "configuration": {"order": [0, 0]}}, LITTLE],
    W.tobytes(),
)
_third(UNSUPPORTED, "gzip", "another codec", [LITTLE, {"name": "gzip"}], W.tobytes())
_third(UNSUPPORTED, "blosc3", "another codec", [LITTLE, {"name": "blosc", "configuration": {}}], W.tobytes())
_third(CORRUPT, "endian", "numbers of which nothing says which byte is first", [{"name": "bytes"}], W.tobytes())
_third(
    CORRUPT, "shard_endian", "an index of which nothing says which byte is first",
    [sharding((3, 2), [LITTLE], index_codecs=[{"name": "bytes"}, CRC32C])], shard(_HALVES),
)  # fmt: skip
_third(UNSUPPORTED, "shard_turned", "a transposition of shards", [
    {"name": "transpose", "configuration": {"order": [1, 0]}}, *_SHARDED
], shard(_HALVES))  # fmt: skip
_arrays(
    UNSUPPORTED, "filled_null", "chunks that are not there, and a value for them that zarr 3 does not have",
    {"w/zarr.json": zarr3(W, (3, 4), [LITTLE], fill_value=None)},
)  # fmt: skip


def _linked(place: Path) -> None:
    shutil.rmtree(place / "d")
    (place / "manifest.ocdbt").unlink()
    (place / "w").mkdir()
    (place / "w" / ".zarray").write_bytes(zarray(W, (3, 4)))
    for name in "ab":
        (place / "w" / name).symlink_to(".")


_add(CORRUPT, "array_linked", "a directory with two links to itself", _linked)
_third(UNSUPPORTED, "no_bytes", "elements that nothing makes bytes of", [], W.tobytes())
_third(CORRUPT, "sum", "a chunk that is shorter than its checksum", [LITTLE, CRC32C], b"ab")
_third(
    CORRUPT, "transformed", "a transformer of the store", [LITTLE], W.tobytes(), storage_transformers=[{"name": "x"}]
)
_third(CORRUPT, "unknown", "a member that must be understood", [LITTLE], W.tobytes(), must={"must_understand": True})

# ------------------------------------------------------------------------------------------------------------ trees


def _tree(exit_code: int, file: str, why: str, text: str | Mapping[str, Any]) -> None:
    told = text if isinstance(text, str) else json.dumps(text)
    _add(exit_code, f"tree_{file}", why, lambda place: (place / "_METADATA").write_text(told))


def _paths(file: str, why: str, *paths: tuple[str | int, ...]) -> None:
    _tree(CORRUPT, file, why, metadata(*(entry(*path, value_type="None", skip_deserialize=True) for path in paths)))


_tree(CORRUPT, "json", "a tree that is not JSON", "{")
_tree(CORRUPT, "deep", "a tree nested 100,000 levels deep", "[" * 100_000)
_tree(CORRUPT, "none", "a description without a tree", {})
_tree(CORRUPT, "list", "a tree that is a list", {"tree_metadata": []})
_tree(
    CORRUPT, "key", "a key of a kind that is not known", metadata(entry("w")).replace('"key_type": 2', '"key_type": 9')
)
_tree(CORRUPT, "number", "a key that is a number", metadata(entry("w")).replace('"key": "w"', '"key": 5'))
_tree(CORRUPT, "text", "a text that is nowhere", metadata(entry("w", value_type="string")))
_tree(
    UNSUPPORTED,
    "skipped",
    "a value that is stored nowhere",
    metadata(entry("w", value_type="X", skip_deserialize=True)),
)
_paths("holes", "a list that lacks an item", ("w", 0), ("w", 2))
_paths("mixed", "keys and indices in one container", ("w", 0), ("w", "1"))
_paths("inside", "a leaf inside a leaf", ("w",), ("w", "v"))
_paths("names", "two paths of one name", ("w", "v"), ("w.v",))
_paths("index", "an index that is not valid", ("w", -1))
_paths("long", "a path of 1,000 keys", ("w",) * 1000)
_paths("root", "a path of no key", ())
_add(
    CORRUPT, "tree_up", "an array whose directory is above the step",
    lambda place: (shutil.rmtree(place / "d"), (place / "manifest.ocdbt").unlink(), (place / "_METADATA").write_text(
        metadata(entry("../../w"))
    )),
)  # fmt: skip
_add(
    CORRUPT, "step_processes", "a step whose processes were not merged",
    lambda place: ((place / "manifest.ocdbt").unlink(), (place / "ocdbt.process_0").mkdir()),
)  # fmt: skip
_add(
    CORRUPT, "step_uncommitted", "a step that has no time at which it was committed",
    lambda place: (place / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}'),
)  # fmt: skip
_add(
    CORRUPT, "step_unfinished", "an item that is not finished", lambda place: (place / "a.orbax-checkpoint-tmp").mkdir()
)  # fmt: skip
_add(
    UNSUPPORTED, "step_no_tree", "a step without a tree", lambda place: (place / "_METADATA").unlink()
)  # fmt: skip
_add(
    CORRUPT, "step_told", "a step whose own metadata are a list",
    lambda place: (place / "_CHECKPOINT_METADATA").write_text("[]"),
)  # fmt: skip
