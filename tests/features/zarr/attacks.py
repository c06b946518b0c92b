"""Hostile and broken arrays of zarr: descriptions, chunks and shards that lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from attacks.corpus import CORRUPT, UNSUPPORTED
from features.compressed.packings import packed
from features.zarr.writer import CRC32C, LITTLE, shard, sharding, zarr3, zarray

W = np.arange(12, dtype="f4").reshape(3, 4)


class Attack(NamedTuple):
    """The values of the array `w`, and the exit code of its refusal."""

    file: str
    why: str
    exit: int
    values: Mapping[str, bytes]


HOSTILE: list[Attack] = []


def _arrays(exit_code: int, file: str, why: str, values: Mapping[str, bytes]) -> None:
    HOSTILE.append(Attack(f"array_{file}", why, exit_code, values))


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
_third(UNSUPPORTED, "no_bytes", "elements that nothing makes bytes of", [], W.tobytes())
_third(CORRUPT, "sum", "a chunk that is shorter than its checksum", [LITTLE, CRC32C], b"ab")
_third(
    CORRUPT, "transformed", "a transformer of the store", [LITTLE], W.tobytes(), storage_transformers=[{"name": "x"}]
)
_third(CORRUPT, "unknown", "a member that must be understood", [LITTLE], W.tobytes(), must={"must_understand": True})
