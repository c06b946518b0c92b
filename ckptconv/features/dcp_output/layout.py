"""Read how a checkpoint of torch.distributed.checkpoint is cut: the chunks of its tensors, and their files."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptconv.features.dcp.locate import located
from ckptconv.features.dcp.metadata import Description, EntryPlace, Shape
from ckptconv.features.dcp.names import FILE, SUFFIX
from ckptconv.features.joining.chunks import Box, ChunkTile, join
from ckptconv.features.joining.names import Path, named_in
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.paths import join as join_path
from ckptconv.tensors.lazy import Stored, Zeros


@dataclass(frozen=True)
class Layout:
    """The division of a checkpoint into files, by key: shapes of tensors, boxes of each tensor with the file of each
    box, and files of other values. `paths` are the paths of all keys in the state dict, `behind` the paths of files
    that store them."""

    shapes: Mapping[str, Shape]
    boxes: Mapping[str, list[tuple[Box, str]]]
    values: Mapping[str, str]
    paths: Mapping[str, Path]
    behind: Sequence[str] = ()

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Its files, and the name of each in a checkpoint like it: `.distcp` files keep their names."""
        names = {*self.values.values(), *(file for placed in self.boxes.values() for _, file in placed)}
        if all(re.fullmatch(FILE, name) for name in names):
            return {name: name for name in names}
        return {name: f"__{rank}_0{SUFFIX}" for rank, name in enumerate(sorted(names))}

    @functools.cached_property
    def first(self) -> str:
        """The file for entries that the checkpoint does not have."""
        return min(self.files.values(), default=f"__0_0{SUFFIX}")


def read_layout(place: Location) -> Layout:
    """Read the layout of the checkpoint in the directory `place`, or below it. Raise UsageError if there is none."""
    from ckptconv.features.dcp.described import describe

    directory = located(place).directory
    behind = [join_path(directory.path, name) for name in directory.names]
    return replace(layout_of(describe(directory), str(directory)), behind=behind)


def layout_of(described: Description, where: str) -> Layout:
    """Return the layout of the checkpoint `where`, which is described so. Raise CorruptError if the chunks of a tensor
    are not all of it, once."""
    boxes = {}
    for key, tensor in described.tensors.items():
        tiles = [ChunkTile(chunk.offsets, Zeros(tensor.dtype, chunk.sizes)) for chunk in tensor.chunks]
        join(tensor.dtype, tensor.shape, tiles, functools.partial(named_in, where, key))
        boxes[key] = [(Box(*chunk[:2]), _file(chunk.place)) for chunk in tensor.chunks]
    return Layout(
        {key: tensor.shape for key, tensor in described.tensors.items()},
        boxes,
        {key: place.name for key, place in described.values.items()},
        described.paths,
    )


def _file(place: EntryPlace | Stored) -> str:
    return place.name if isinstance(place, EntryPlace) else basename(place.file.path)
