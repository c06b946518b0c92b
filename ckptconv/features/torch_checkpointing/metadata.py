"""Reads the `metadata.pkl` of a step: the file of each item on each rank, and each rank's part of each tensor.

Source: torch_checkpointing/{distributed_metadata,dtensor_metadata,default_metadata,checkpoint_layout}.py of 0.1.0 and
0.1.1. It is a pickle of dicts, lists, tuples, texts and integers. Version 2.0 is grouped by item; version 1.0 has one
entry for each path, which begins with the item. Paths are JSON lists as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, LimitError, UnsupportedError, damaged
from ckptconv.features.joining.chunks import Shape
from ckptconv.features.joining.layouts import Distribution, HeldBox, Mesh, MeshCut
from ckptconv.features.joining.names import MAX_DEPTH, Path, dotted, named
from ckptconv.features.joining.pieces import MAX_FACTOR, MAX_RANKS
from ckptconv.features.torch_checkpointing.locate import JSON, RAW, SAFETENSORS, TORCH, ItemFile
from ckptconv.pickles.machine import load
from ckptconv.storage import strict_json
from ckptconv.storage.inside import check_inside
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS
from ckptconv.text import brief

_KINDS = frozenset({TORCH, SAFETENSORS, JSON, RAW})
_VERSIONS = ("1.0", "2.0")
# The first indices of a rank's boxes in the tensor, their first indices in the rank's part, and their extents.
_BOXES = ("global_offsets", "local_offsets", "local_sizes")


class Distributed(NamedTuple):
    """A tensor that is distributed over a device mesh."""

    layout: Distribution
    dtype: DType

    @property
    def shape(self) -> Shape:
        return self.layout.shape


class Rectangles(NamedTuple):
    """A rank's boxes of a tensor."""

    shape: Shape
    boxes: tuple[HeldBox, ...]
    dtype: DType


Geometry: TypeAlias = "Distributed | Rectangles"


@dataclass
class DescribedItem:
    """An item: its file on each rank, None for the default one; and its tensors: the ranks of each geometry. The steps
    of their paths are all text; `ways` are the paths in the item's value."""

    files: dict[int, ItemFile | None]
    tensors: dict[Path, list[tuple[frozenset[int], Geometry]]] = field(default_factory=dict)
    ways: dict[Path, Path] = field(default_factory=dict)

    def geometry(self, path: Path, rank: int) -> Geometry | None:
        """Return a rank's part of the tensor at `path`; None if it has none."""
        return next((part for ranks, part in self.tensors.get(path, ()) if rank in ranks), None)

    def has_stages(self) -> bool:
        """Return whether the first rank lacks some tensors, as with pipeline stages."""
        return any(all(0 not in ranks for ranks, _ in groups) for groups in self.tensors.values())

    def ranks(self) -> set[int]:
        """Return the ranks that have a part of any tensor."""
        holders: set[int] = set()
        for group in {ranks for groups in self.tensors.values() for ranks, _ in groups}:
            holders |= group
        return holders


@dataclass
class StepMetadata:
    """The content of `metadata.pkl`: the version, the number of ranks, and the items. `knows_strides` is whether it has
    a strided placement: 0.1.0 wrote plain ones in their place."""

    version: str
    world: int
    items: dict[str, DescribedItem] = field(default_factory=dict)
    knows_strides: bool = False


def text_path(path: Path) -> Path:
    """Return a path with every step as text. The metadata and pickled state dicts are compared by it."""
    return tuple(map(str, path))


def read_metadata(data: bytes, where: str, directory: str) -> StepMetadata:
    """Return the metadata in the pickle `data` of the file `where` in `directory`.

    Raise CorruptError if it contradicts itself, UnsafeError for an attack or a path that leads out, UnsupportedError
    for metadata that no known release writes.
    """
    loaded = load(data, where=where)
    if loaded.end != len(data):
        raise CorruptError(f"{where} has data after the end of its pickle.")
    return _Reading(where, directory).read(loaded.value)


@dataclass
class _Reading:
    where: str
    directory: str
    _meshes: dict[Any, Mesh] = field(default_factory=dict)
    _layouts: dict[Any, Any] = field(default_factory=dict)
    _ranks: dict[tuple[int, ...], frozenset[int]] = field(default_factory=dict)
    _strided: bool = False

    def _corrupt(self, reason: str) -> CorruptError:
        return damaged(f"{self.where} is not valid metadata of a step: {reason}.")

    def read(self, root: Any) -> StepMetadata:
        root = self._dict(root, "it")
        version = root.get("version", "1.0")
        if version not in _VERSIONS:
            raise UnsupportedError(
                f"{self.where} has version {brief(version)}; only versions {' and '.join(_VERSIONS)} are supported."
            )
        world = root.get("world_size")
        if type(world) is not int or not 0 < world <= MAX_RANKS:
            raise self._corrupt(f"its world_size {brief(world)} is invalid")
        step = StepMetadata(version, world)
        metadata = self._dict(root.get("metadata"), "its metadata")
        if version == "1.0":
            self._read_flat(step, metadata, self._dict(root.get("rank_to_layout_info_mappings"), "its files"))
        else:
            for name, item in metadata.items():
                called = self._item(name)
                item = self._dict(item, called)
                files = self._dict(item.get("rank_to_layout_info"), f"the files of {called}")
                step.items[name] = DescribedItem(self._files(name, files, world))
                tensors = self._dict(item.get("nested_path_to_metadata"), f"the tensors of {called}")
                for text, groups in tensors.items():
                    self._add(step, name, self._path(text), groups)
        self._check_files(step)
        step.knows_strides = self._strided
        return step

    def _read_flat(self, step: StepMetadata, metadata: Mapping[Any, Any], files: Mapping[Any, Any]) -> None:
        """Read version 1.0."""
        for text, groups in metadata.items():
            path = self._path(text)
            if not path or type(path[0]) is not str:
                raise self._corrupt(f"{brief(text)} is not the path of an item")
            name = path[0]
            if name not in step.items:
                self._item(name)
                item_files = {
                    rank: self._dict(names, f"the files of rank {brief(rank)}").get(name)
                    for rank, names in files.items()
                }
                step.items[name] = DescribedItem(self._files(name, item_files, step.world))
            self._add(step, name, path[1:], groups)

    def _dict(self, value: Any, called: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise self._corrupt(f"{called} is not a dict")
        return value

    def _item(self, name: Any) -> str:
        if type(name) is not str:
            raise self._corrupt(f"the name of an item, {brief(name)}, is not text")
        check_inside(f"{name}_0.pt", self.where, self.directory)
        return named(name)

    def _path(self, text: Any) -> Path:
        try:
            path = strict_json.parse(text) if type(text) is str else None
        except ValueError:
            path = None
        if type(path) is not list or any(type(step) not in (str, int) for step in path):
            raise self._corrupt(f"{brief(text)} is not a path")
        if len(path) > MAX_DEPTH:
            raise LimitError(f"{self.where} has a path of {len(path)} steps; at most {MAX_DEPTH} are supported.")
        return tuple(path)

    # ---------------------------------------------------------------------------------------------------------- files

    def _files(self, name: str, layouts: Mapping[Any, Any], world: int) -> dict[int, ItemFile | None]:
        files: dict[int, ItemFile | None] = {}
        for rank, layout in layouts.items():
            number = int(rank) if type(rank) is str and rank.isascii() and rank.isdecimal() and len(rank) < 9 else rank
            if type(number) is not int or number in files:
                raise self._corrupt(f"the files of {named(name)} have the invalid or repeated rank {brief(rank)}")
            files[number] = None if layout is None else self._item_file(layout)
        if files.keys() != set(range(world)):
            raise self._corrupt(
                f"it records {world} ranks, but lists files of {named(name)} for the ranks {brief(sorted(files))}"
            )
        return files

    def _item_file(self, layout: Any) -> ItemFile:
        layout = self._dict(layout, "a file's entry")
        path, kind = (
            layout.get("file_path"),
            self._dict(layout.get("serialization_format"), "a file's format").get("type"),
        )
        if type(path) is not str:
            raise self._corrupt(f"the path of a file, {brief(path)}, is not text")
        check_inside(path, self.where, self.directory)
        if kind not in _KINDS:
            raise UnsupportedError(f"{self.where}: {path[:200]} has the unknown format {brief(kind)}.")
        return ItemFile(path, kind)

    def _check_files(self, step: StepMetadata) -> None:
        """Raise CorruptError if two ranks or items share a file."""
        used: dict[str, str] = {}
        for name, item in step.items.items():
            for rank, file in item.files.items():
                path = file.path if file else f"{name}_{rank}.pt"
                called = f"{named(name)} of rank {rank}"
                if path in used:
                    raise self._corrupt(f"{used[path]} and {called} are both in {path[:200]}")
                used[path] = called

    # -------------------------------------------------------------------------------------------------------- tensors

    def _add(self, step: StepMetadata, name: str, path: Path, groups: Any) -> None:
        item, at = step.items[name], text_path(path)
        called = named(dotted((name, *path)))
        if at in item.tensors:
            raise self._corrupt(f"it describes {called} twice")
        if type(groups) is not list or not groups:
            raise self._corrupt(f"it has no list of descriptions of {called}")
        seen: set[int] = set()
        geometries = []
        for group in groups:
            group = self._dict(group, f"a description of {called}")
            ranks = self._of_ranks(called, group.get("ranks"), step.world)
            if seen & ranks:
                raise self._corrupt(f"it describes {called} twice for rank {min(seen & ranks)}")
            seen |= ranks
            geometries.append((ranks, self._geometry(called, self._dict(group.get("sharding_metadata"), called))))
        if len({(geometry.shape, geometry.dtype) for _, geometry in geometries}) > 1:
            kinds = dict.fromkeys(f"{one.dtype} of shape {list(one.shape)}" for _, one in geometries)
            first, other, *_ = kinds
            raise self._corrupt(f"it describes {called} as {first} and as {other}")
        item.tensors[at], item.ways[at] = geometries, path

    def _of_ranks(self, called: str, listed: Any, world: int) -> frozenset[int]:
        if not isinstance(listed, (tuple, list)) or len(listed) > MAX_RANKS:
            raise self._corrupt(f"{called} has an invalid list of ranks, {brief(listed)}")
        if any(type(rank) is not int or not 0 <= rank < world for rank in listed):
            raise self._corrupt(f"{called} has an invalid rank in {brief(listed)}: there are {world} ranks")
        key = tuple(listed)
        return self._ranks.setdefault(key, frozenset(key))

    def _geometry(self, called: str, description: Mapping[Any, Any]) -> Geometry:
        reader = _GEOMETRIES.get(str(description.get("type")))
        if reader is None:
            raise UnsupportedError(
                f"{self.where}: {called} has the unknown placement {brief(description.get('type'))}."
            )
        return reader(self, called, self._dict(description.get("data"), called))

    def _counts(self, called: str, value: Any) -> Shape:
        if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
            raise self._corrupt(f"{called} has the invalid shape {brief(value)}")
        if any(type(count) is not int or not 0 <= count < MAX_BYTES for count in value) or (
            math.prod(value) >= MAX_BYTES
        ):
            raise self._corrupt(f"{called} has the invalid shape {brief(tuple(value))}")
        return tuple(value)

    def _dtype(self, called: str, text: Any) -> DType:
        name = text[len("torch.") :] if type(text) is str and text.startswith("torch.") else ""
        if name not in DTYPES:
            raise UnsupportedError(f"{self.where}: {called} has the unknown dtype {brief(text)}.")
        return DTYPES[name]

    def _distributed(self, called: str, data: Mapping[Any, Any]) -> Geometry:
        shape = self._counts(called, data.get("global_shape"))
        mesh = self._mesh(called, self._dict(data.get("mesh_spec"), f"the mesh of {called}"))
        listed = data.get("placements")
        if not isinstance(listed, (tuple, list)) or len(listed) != len(mesh.shape):
            raise self._corrupt(f"{called} has placements {brief(listed)}, but a mesh of {len(mesh.shape)} dimensions")
        placements = tuple(self._placement(called, placement, shape) for placement in listed)
        if math.prod(cut.factor for cut in placements if cut) > MAX_FACTOR:
            raise LimitError(
                f"{self.where}: {called} is split into more than {MAX_FACTOR} strided pieces, which is the limit."
            )
        layout = Distribution(mesh, placements, shape)
        return Distributed(self._layouts.setdefault(layout, layout), self._dtype(called, data.get("dtype")))

    def _placement(self, called: str, placement: Any, shape: Shape) -> MeshCut | None:
        placement = self._dict(placement, f"a placement of {called}")
        kind, dim, factor = placement.get("type"), placement.get("dim"), placement.get("split_factor", 1)
        if kind == "Replicate":
            return None
        if kind not in ("Shard", "StridedShard"):
            raise UnsupportedError(f"{self.where}: {called} has the unknown placement {brief(kind)}.")
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise self._corrupt(f"{called} is sharded along dimension {brief(dim)}, but has {len(shape)} dimensions")
        if type(factor) is not int or not 1 <= factor <= MAX_FACTOR:
            raise self._corrupt(f"{called} has a strided placement with the invalid split factor {brief(factor)}")
        self._strided = self._strided or kind == "StridedShard"
        return MeshCut(dim, factor if kind == "StridedShard" else 1)

    def _mesh(self, called: str, spec: Mapping[Any, Any]) -> Mesh:
        known = self._meshes.get(id(spec))
        if known is not None:
            return known
        shape, ranks, names = spec.get("mesh_shape"), spec.get("mesh_data"), spec.get("mesh_dim_names")
        shape = self._counts(called, shape)
        if not isinstance(ranks, (tuple, list)) or not 0 < len(ranks) == math.prod(shape) <= MAX_RANKS:
            count = len(ranks) if isinstance(ranks, (tuple, list)) else "no"
            raise self._corrupt(f"{called} is on a mesh of shape {list(shape)} that lists {count} ranks")
        if any(type(rank) is not int or rank < 0 for rank in ranks) or len(set(ranks)) != len(ranks):
            raise self._corrupt(f"{called} is on a mesh that lists invalid or repeated ranks")
        dims = names if isinstance(names, (tuple, list)) and len(names) == len(shape) else ()
        mesh = Mesh(tuple(ranks), shape, tuple(map(str, dims)))
        return self._meshes.setdefault(id(spec), self._layouts.setdefault(mesh, mesh))

    def _rectangles(self, called: str, data: Mapping[Any, Any]) -> Geometry:
        shape = self._counts(called, data.get("global_shape"))
        lists = [numbers for key in _BOXES if isinstance(numbers := data.get(key), (tuple, list))]
        if len(lists) != len(_BOXES) or len(set(map(len, lists))) != 1:
            raise self._corrupt(f"{called} lacks shard offsets or sizes, or has different numbers of these")
        boxes = tuple(HeldBox(*(self._counts(called, numbers) for numbers in box)) for box in zip(*lists, strict=True))
        for box in boxes:
            if not len(box.offsets) == len(box.inside) == len(box.sizes) == len(shape):
                raise self._corrupt(
                    f"{called} has a shard with the offsets {list(box.offsets)} and {list(box.inside)} and the sizes "
                    f"{list(box.sizes)}, but the tensor has {len(shape)} dimensions"
                )
            if any(at + size > most for at, size, most in zip(box.offsets, box.sizes, shape, strict=True)):
                raise self._corrupt(
                    f"{called} has the shape {list(shape)}, but its shard of {list(box.sizes)} at {list(box.offsets)} "
                    "extends beyond it"
                )
        return Rectangles(shape, boxes, self._dtype(called, data.get("dtype")))


_GEOMETRIES = {"DTensorShardingMetadata": _Reading._distributed, "default_tensor_v1": _Reading._rectangles}
