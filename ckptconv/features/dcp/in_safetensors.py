"""Chunks of tensors in safetensors files: the shards of HuggingFaceStorageWriter, which describe themselves, and what
SerializationFormat.SAFETENSORS writes at the end of a `.distcp` file.

Source: torch/distributed/checkpoint/hf_storage.py and filesystem.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CorruptError, damaged
from ckptconv.features.dcp.metadata import Chunk, Description, EntryPlace, SavedTensor, Shape, agree
from ckptconv.features.dcp.names import SHARD, SHARDING
from ckptconv.features.joining.names import named
from ckptconv.formats import model_files, safetensors
from ckptconv.storage import strict_json
from ckptconv.storage.buffered import BufferedReader
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.text import count_of


def read_shards(directory: Location, inputs: dict[str, Any]) -> tuple[Description, int]:
    """Return the description of the files of HuggingFaceStorageWriter, each of which states where its tensors begin,
    and the number of bytes read. Put the identity of each file into `inputs`."""
    names = directory.names
    files = [name for name in names if re.fullmatch(SHARD, name)]
    numbers = sorted({int(name[6:11]) for name in files})
    if numbers != list(range(1, len(numbers) + 1)):
        missing = next(number for number in range(1, len(numbers) + 2) if number not in numbers)
        raise CorruptError(
            f"{directory} lacks shard {missing} of {numbers[-1]}: shard-{missing:05d}-….safetensors.",
            "Copy the files of all ranks to one place.",
        )
    described, bytes_read = Description(nested=False), 0
    for name in files:
        place = directory.at(names[name].file)
        header = safetensors.header_of(place)
        bytes_read += header.bytes_read
        inputs[name] = header.identity
        for key, (offsets, stored) in _offsets_of(header.tensors, header.metadata, place.path).items():
            saved = described.tensors.setdefault(key, SavedTensor(stored.dtype, (0,) * len(offsets)))
            if saved.dtype != stored.dtype or len(saved.shape) != len(offsets):
                raise CorruptError(
                    f"{place}: {named(key)} is {stored.dtype} with {count_of(len(offsets), 'dimension')}, but in other "
                    f"shards {saved.dtype} with {count_of(len(saved.shape), 'dimension')}."
                )
            ends = (offset + size for offset, size in zip(offsets, stored.shape, strict=True))
            saved.shape = tuple(map(max, saved.shape, ends))
            if stored.numel:
                saved.add_once(Chunk(offsets, stored.shape, stored))
    described.paths = {name: (name,) for name in described.tensors}
    return described, bytes_read


def chunk_in(
    headers: dict[tuple[str, int], Mapping[str, Chunk]],
    name: str,
    tensor: SavedTensor,
    chunk: Chunk,
    reader: BufferedReader,
) -> LazyTensor:
    """Return a chunk from the safetensors file that begins at its place. `headers` are those that were read, by name of
    the file and place in it."""
    place = chunk.place
    assert isinstance(place, EntryPlace)

    def where() -> str:
        return f"{reader.file.path}: the chunk of {named(name)} at {list(chunk.offsets)}"

    key = place.name, place.offset
    if key not in headers:
        head = reader.read_at(place.offset, min(16, reader.file.size - place.offset))
        if not model_files.looks_like_safetensors(head, reader.file.size - place.offset):
            raise damaged(
                f"{where()} is not an archive of torch.save: byte {place.offset} begins {head!r}. The file belongs "
                "to another save, or is damaged."
            )
        header = safetensors.read_header(reader, place.offset)
        headers[key] = {
            part: Chunk(offsets, stored.shape, stored)
            for part, (offsets, stored) in _offsets_of(header.tensors, header.metadata, reader.file.path).items()
        }
    known = headers[key].get(name)
    if known is None:
        raise CorruptError(f"{where()} is not in the safetensors file at byte {place.offset}.")
    stored = known.place
    assert isinstance(stored, Stored)
    if known.offsets != chunk.offsets:
        raise CorruptError(
            f"{where()} is missing: the only chunk with its name begins at {list(known.offsets)}. When a rank has "
            "several chunks of a tensor, torch saves only the last one.",
            "Save it again, in the default format.",
        )
    agree(where, (stored.dtype, stored.shape), (tensor.dtype, chunk.sizes))
    if place.length != stored.nbytes:
        raise CorruptError(f"{where()} has {stored.nbytes} bytes, but the metadata records {place.length}.")
    return stored


def _offsets_of(
    tensors: Mapping[str, Stored], metadata: Mapping[str, str], where: str
) -> dict[str, tuple[Shape, Stored]]:
    """Return a safetensors file's tensors, each with its offsets in the tensor that it is a chunk of."""
    try:
        info = strict_json.parse(metadata.get(SHARDING, "{}"))
    except ValueError:
        info = None
    if type(info) is not dict:
        raise CorruptError(f"{where}: its {SHARDING} is not a JSON object.")
    offset_tensors = {}
    for name, stored in tensors.items():
        entry = info.get(name)
        offsets = entry.get("saved_offsets") if type(entry) is dict else None
        if (
            type(offsets) is not list
            or len(offsets) != len(stored.shape)
            or any(type(offset) is not int or not 0 <= offset < 1 << 62 for offset in offsets)
        ):
            raise CorruptError(f"{where}: its {SHARDING} does not contain valid offsets of {named(name)}.")
        offset_tensors[name] = tuple(offsets), stored
    return offset_tensors
