"""Writes checkpoints as torch.distributed.checkpoint does, of any tiling and broken in any way, in one process.

The metadata are torch's own classes, pickled, and every entry is made by torch.save; only who holds which chunk, where
a real run needs many processes, is said here.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Shape = tuple[int, ...]
# A box of a tensor: where it begins, and its sizes.
Box = tuple[Shape, Shape]


def entry_of(value: Any) -> bytes:
    """What torch.save writes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    offsets, sizes = box
    part = tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
    return part.clone(memory_format=torch.contiguous_format)


def whole(shape: Sequence[int]) -> list[Box]:
    """One chunk that is all of a tensor."""
    return [((0,) * len(shape), tuple(shape))]


def grid(shape: Shape, cuts: Mapping[int, Sequence[int]]) -> list[Box]:
    """The boxes between planes: for each dimension, where it is cut."""
    edges = [[0, *cuts.get(dim, ()), extent] for dim, extent in enumerate(shape)]
    ranges = [list(itertools.pairwise(each)) for each in edges]
    return [
        (tuple(low for low, _ in box), tuple(high - low for low, high in box)) for box in itertools.product(*ranges)
    ]


def shards(shape: Shape, dim: int, ranks: int) -> list[Box]:
    """What DTensor's Shard(dim) gives to so many ranks: as torch.chunk does, with empty ones at the end."""
    size = -(-shape[dim] // ranks)
    boxes = []
    for rank in range(ranks):
        low, high = min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = low, high - low
        boxes.append((tuple(offsets), tuple(sizes)))
    return boxes


@dataclass
class Checkpoint:
    """A checkpoint to be: what it says it holds, and the bytes of its files. All may be changed before."""

    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    places: list[tuple[MetadataIndex, Any]] = field(default_factory=list)
    paths: dict[str, tuple[Any, ...]] | None = field(default_factory=dict)
    files: dict[str, bytearray] = field(default_factory=dict)
    # What becomes of the bytes of an entry, and what its place says of it.
    pack: Callable[[bytes], bytes] | None = None
    descriptors: list[str] | None = None

    def add(
        self,
        path: Sequence[Any],
        tensor: torch.Tensor,
        boxes: Sequence[Box] | None = None,
        order: Sequence[int] | None = None,
        ranks: int = 2,
        save: Callable[[torch.Tensor], Any] = lambda part: part,
    ) -> str:
        """A tensor in these boxes, listed in this order; the chunks go to the ranks' files in turn."""
        boxes = whole(tensor.shape) if boxes is None else boxes
        name = ".".join(map(str, path))
        listed = [boxes[index] for index in (order if order is not None else range(len(boxes)))]
        self.tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            tensor.shape,
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in listed],
        )
        self._tell_path(name, path)
        for number, box in enumerate(boxes):
            index = MetadataIndex(name, torch.Size(box[0]), number)
            self._put(index, f"__{number % ranks}_0.distcp", entry_of(save(cut(tensor, box))))
        return name

    def add_value(self, path: Sequence[Any], value: Any) -> str:
        """Something that is no tensor."""
        name = ".".join(map(str, path))
        self.tensors[name] = BytesStorageMetadata()
        self._tell_path(name, path)
        self._put(MetadataIndex(name), "__0_0.distcp", entry_of(value))
        return name

    def _tell_path(self, name: str, path: Sequence[Any]) -> None:
        if self.paths is not None:
            self.paths[name] = tuple(path)

    def _put(self, index: MetadataIndex, file: str, data: bytes) -> None:
        content = self.files.setdefault(file, bytearray())
        data = self.pack(data) if self.pack else data
        info = _StorageInfo(file, len(content), len(data))
        if self.descriptors is not None:
            info.transform_descriptors = self.descriptors
        self.places.append((index, info))
        content += data

    def metadata(self) -> Metadata:
        return Metadata(self.tensors, self.paths, dict(self.places), None)

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (directory / name).write_bytes(data)
        (directory / ".metadata").write_bytes(pickle.dumps(self.metadata()))
        return directory


def one(tensor: torch.Tensor, boxes: Iterable[Box] | None = None, **options: Any) -> Checkpoint:
    """A checkpoint of a model with one tensor, `w`."""
    made = Checkpoint()
    made.add(("model", "w"), tensor, None if boxes is None else list(boxes), **options)
    return made
