"""Writes arrays of zarr, by their keys: descriptions, chunks, and shards."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from features.compressed.packings import crc32c, packed


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
