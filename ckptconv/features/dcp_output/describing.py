"""Write the `.metadata` of a checkpoint of torch.distributed.checkpoint: a pickle of torch's dataclasses.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py. Of the fields that releases have added, none is written
that an older one cannot read: `storage_meta` (2.4), `transform_descriptors` (2.7) and `version` (2.9) have defaults,
and the strides in `TensorProperties` (2.15) are a hint. So torch 2.4 to 2.15 read the same file, and it says nothing of
the machine that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckptconv.features.dcp import MODULE
from ckptconv.features.dcp.metadata import Shape
from ckptconv.features.joining.names import Path
from ckptconv.features.torch_files.writer import Call, Known, Plain, dumps
from ckptconv.pickles.nodes import Global

_METADATA = Global(MODULE, "Metadata")
_TENSOR = Global(MODULE, "TensorStorageMetadata")
_VALUE = Global(MODULE, "BytesStorageMetadata")
_CHUNK = Global(MODULE, "ChunkStorageMetadata")
_PROPERTIES = Global(MODULE, "TensorProperties")
_MEMORY_FORMAT = Global(MODULE, "_MEM_FORMAT_ENCODING")
_INDEX = Global(MODULE, "MetadataIndex")
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = 0


class SavedChunk(NamedTuple):
    """A box of a tensor, and where it is saved: a file, and the offset and size of its entry in bytes."""

    offsets: Shape
    sizes: Shape
    file: str
    offset: int
    length: int


class Saved(NamedTuple):
    """A tensor, or if `dtype` is None another value in one entry. `path` is its path in the state dict; ()
    if the program that reads it knows no paths."""

    path: Path
    dtype: str | None
    shape: Shape
    chunks: list[SavedChunk]


class _Key(NamedTuple):
    """The key of an entry: that of its value, and the number of the chunk; None for a value that is no tensor."""

    key: str
    number: int | None
    offsets: Shape


class _Steps(NamedTuple):
    path: Path


def description(saved: Mapping[str, Saved]) -> bytes:
    """Return the pickle that describes what is saved, by key."""
    state = {
        "state_dict_metadata": dict(saved),
        "planner_data": {key: _Steps(entry.path) for key, entry in saved.items() if entry.path},
        "storage_data": {
            _Key(key, None if item.dtype is None else number, chunk.offsets): chunk
            for key, item in saved.items()
            for number, chunk in enumerate(item.chunks)
        },
    }
    return dumps(_made(_METADATA, state), _reduced)


def _reduced(value: Any) -> Plain | None:
    """Return the call for `value` in the pickle. It is made when it is written: for a million chunks, all calls at once
    would take far more memory than the pickle."""
    writer = _WRITERS.get(type(value))
    return Plain(writer(value)) if writer else None


def _made(cls: Global, state: Any = None) -> Call:
    """Return the object of a dataclass with this state."""
    return Call(cls, (), () if state is None else (state,), new=True)


def _described(saved: Saved) -> Call:
    if saved.dtype is None:
        return _made(_VALUE)
    chunks = [_chunk(chunk.offsets, chunk.sizes) for chunk in saved.chunks]
    return _made(_TENSOR, {"properties": _properties(saved.dtype), "size": _size(saved.shape), "chunks": chunks})


def _properties(dtype: str) -> Known:
    # dtype, layout, requires_grad, memory format, pin_memory
    state = Global("torch", dtype), _STRIDED, False, Call(_MEMORY_FORMAT, (_CONTIGUOUS,)), False
    return Known(("properties", dtype), _made(_PROPERTIES, state))


def _size(shape: Shape) -> Known:
    return Known(("size", shape), Call(_SIZE, (shape,)))


def _chunk(offsets: Shape, sizes: Shape) -> Known:
    return Known(("chunk", offsets, sizes), _made(_CHUNK, {"offsets": _size(offsets), "sizes": _size(sizes)}))


def _index(entry: _Key) -> Call:
    if entry.number is None:
        return _made(_INDEX, {"fqn": entry.key, "index": None})
    return _made(_INDEX, {"fqn": entry.key, "index": entry.number, "offset": _size(entry.offsets)})


def _place(chunk: SavedChunk) -> Call:
    return _made(_INFO, {"relative_path": chunk.file, "offset": chunk.offset, "length": chunk.length})


_WRITERS: dict[type, Callable[[Any], Any]] = {
    Saved: _described,
    SavedChunk: _place,
    _Key: _index,
    _Steps: lambda steps: steps.path,
}
