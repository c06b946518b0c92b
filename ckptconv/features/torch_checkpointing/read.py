"""Opens a step of torch_checkpointing.

The files of the weights are read rank after rank, descriptions only; the optimizer's only if its states are wanted, and
all files if a key is. A rank's part of a tensor is described by its pickled DTensor, or by `metadata.pkl`, or by both:
then they must agree. The parts are joined like those of one state dict for each rank, with the items as first steps of
paths.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.joining import names as names_of
from ckptconv.features.joining.chunks import ChunkTile, Shape
from ckptconv.features.joining.files import Files, RankFiles, bytes_of, divided, left_of, source_of, states_of
from ckptconv.features.joining.integrity import check_content, parsed_json, stated_digests
from ckptconv.features.joining.join import Ranks, lacking, other_save
from ckptconv.features.joining.layouts import Distribution, Mesh
from ckptconv.features.joining.names import MAX_VALUE, Path, left_by_key, named
from ckptconv.features.joining.pieces import Piece, Pieces, RankPart, Shards, Whole, shape_of
from ckptconv.features.joining.run_layout import Located
from ckptconv.features.torch_checkpointing import locate as steps
from ckptconv.features.torch_checkpointing.locate import (
    FAMILY,
    JSON,
    MANIFEST,
    RAW,
    SAFETENSORS,
    TORCH,
    Item,
    ItemFile,
    check_finished,
    items_of,
)
from ckptconv.features.torch_checkpointing.metadata import (
    DescribedItem,
    Distributed,
    Geometry,
    Rectangles,
    StepMetadata,
    read_metadata,
    text_path,
)
from ckptconv.formats import safetensors
from ckptconv.formats.run_names import STEP_METADATA
from ckptconv.formats.source import MODEL_KEYS, Source, Wanted
from ckptconv.formats.torch.container import MAX_PICKLE
from ckptconv.formats.torch.file import read_torch
from ckptconv.pickles.children import is_tensor, walk
from ckptconv.plan import Input
from ckptconv.storage.ahead import ahead
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor, Narrow, Tagged, TensorFacts
from ckptconv.text import brief, count_of, format_size, some

# The item of a library that saves the whole state of a rank in one file: the state is its content.
_WHOLE = "checkpoint"


def _is_replica(geometry: Geometry, world: int) -> bool:
    """Return whether each of `world` ranks has the whole tensor. The metadata say it for every plain tensor."""
    if not isinstance(geometry, Distributed) or any(geometry.layout.placements):
        return False
    return len(geometry.layout.mesh.ranks) == world


def _described_as(shape: Shape, dtype: str | None, node: Piece | Geometry) -> dict[str, str]:
    """Return the facts of a tensor, of those that are known, as a message shows them."""
    facts = {"the shape": str(list(shape)), **({"the dtype": dtype} if dtype else {})}
    if isinstance(node, Shards):
        facts["the type"] = "ShardedTensor"
    if isinstance(node, (RankPart, Distributed)):
        mesh, placements = node.layout.mesh, node.layout.placements
        facts["the mesh"] = brief((mesh.ranks, mesh.shape))
        facts["the placements"] = brief(tuple(tuple(cut) if cut else None for cut in placements))
    return facts


def read(place: Location, wanted: Wanted) -> Source:
    """Open a step by its directory, or by a directory above it.

    Raise CorruptError if it is unfinished, if files of ranks are missing, or if they contradict each other or the
    metadata; UnsupportedError if it is unknown which part of a tensor a rank has.
    """
    located = steps.locate(place) or Located(place)
    check_finished(located.directory)
    return _read(place.path, located, wanted)


def _read(path: str, located: Located, wanted: Wanted) -> Source:
    step = _Step.open(located.directory)
    step.read(wanted)
    opened = RankFiles(step.files)
    return source_of(
        opened,
        located,
        wanted,
        states_of(opened, wanted) if wanted.states else (None, None, []),
        *step.told(wanted, opened.weights),
        format=f"torch_checkpointing of {step.world} rank{'s' * (step.world > 1)}",
        family=FAMILY,
        path=path,
        facts=step.facts(path),
        left=functools.partial(left_of, opened, step.unread),
        reread=functools.partial(_read, path, located),
    )


@dataclass
class _Step:
    """A step: its directory, its metadata, and what was read of it.

    `unread` are items of which only one rank's file was read, or none, and whether that file has tensors. The metadata
    does not describe the tensors in `undescribed`.
    """

    directory: Location
    described: StepMetadata | None
    items: dict[str, Item]
    files: Files
    world: int = 1
    version: str = ""
    unread: dict[str, bool] = field(default_factory=dict)
    large: list[str] = field(default_factory=list)
    undescribed: list[str] = field(default_factory=list)
    _boxes: dict[Path, frozenset[tuple[Shape, Shape]]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------- the directory

    @classmethod
    def open(cls, directory: Location) -> _Step:
        """Read the metadata and the manifest, and find the items."""
        files = Files(Ranks(directory.path))
        step = cls(directory, None, {}, files)
        step._read_manifest()
        if STEP_METADATA in directory.names:
            data = step._bytes(STEP_METADATA, MAX_PICKLE)
            step.described = read_metadata(data, directory.join(STEP_METADATA).path, directory.path)
        if step.described:
            described = {name: item.files for name, item in step.described.items.items()}
            step.items = items_of(directory, described, step.described.world)
            step.world, step.version = step.described.world, step.described.version
            over = [file for item in step.items.values() for file in item.files.items() if file[0] >= step.world]
            if over:
                raise other_save(
                    f"{directory.join(over[0][1].path)} belongs to rank {over[0][0]}, but {STEP_METADATA} records only "
                    f"{count_of(step.world, 'rank')}."
                )
        else:
            step.items = items_of(directory)
            step.world = max((max(item.files) + 1 for item in step.items.values() if item.has_tensors), default=1)
        return step

    def _bytes(self, name: str, most: int) -> bytes:
        """Return the contents of a small file, which becomes an input."""
        with self.directory.join(name).open_reader() as reader:
            file = reader.file
            if file.size > most:
                raise CorruptError(f"{file.path} has {file.size} bytes; at most {most} are supported.")
            data = reader.read_at(0, file.size)
        check_content(file.path, data, self.files.log.digests)
        self.files.log.bytes_read += len(data)
        self.files.log.inputs[name] = Input(file, (file.size, zlib.crc32(data)))
        return data

    def _read_manifest(self) -> None:
        """Read the SHA-256 of the files, and check that the files exist."""
        if MANIFEST in self.directory.names:
            data = self._bytes(MANIFEST, MAX_VALUE)
            stated = stated_digests(self.directory, MANIFEST, data, {"version": 1, "granularity": "file"})
            self.files.log.digests.update(stated)

    # -------------------------------------------------------------------------------------------------------- reading

    def read(self, wanted: Wanted) -> None:
        """Read the files of the wanted items."""
        chosen = self._chosen(wanted)
        for name in chosen:
            self._check_complete(name)
        ranks = self.files.ranks
        for rank in range(self.world):
            files = {name: self.items[name].files[rank] for name in chosen if rank in self.items[name].files}
            if files:
                self._read_rank(rank, files)
        ranks.check_names(self.described.items if self.described else ())
        for name, item in self.items.items():
            if name not in chosen:
                self._look_into(name, item)

    def _chosen(self, wanted: Wanted) -> list[str]:
        """Return the names of the items whose files are read for all ranks."""
        every = list(self.items)
        if wanted.key:
            return every
        holding = [name for name in every if self.items[name].has_tensors]
        optimizers = [name for name in holding if names_of.is_optimizer(name)]
        models = [name for name in holding if name in MODEL_KEYS]
        weights = models or [name for name in holding if name not in optimizers and self._has_tensors(name)]
        if not weights:
            return optimizers or every
        return [*weights, *(optimizers if wanted.states else ())]

    def _has_tensors(self, name: str) -> bool:
        """Return whether the first file of an item has tensors."""
        if self.described and name in self.described.items:
            return bool(self.described.items[name].tensors)
        file = self.items[name].files[min(self.items[name].files)]
        if file.kind == SAFETENSORS:
            return True
        return any(map(is_tensor, walk(read_torch(self._place(file)).value)))

    def _look_into(self, name: str, item: Item) -> None:
        """Keep the first rank's values of an item that was not wanted."""
        if names_of.is_optimizer(name):
            self.unread[name] = True
            return
        file = item.files[min(item.files)]
        self.unread[name] = item.has_tensors and self._has_tensors(name)
        if file.kind == JSON:
            self.files.ranks.values[name,] = self._value(file)

    def _place(self, file: ItemFile) -> Location:
        names = self.directory.names
        return self.directory.at(names[file.path].file) if file.path in names else self.directory.join(file.path)

    def _check_complete(self, name: str) -> None:
        """Raise CorruptError if files of ranks are missing."""
        item = self.items[name]
        if item.shared or not item.has_tensors:
            return
        description = self.described.items.get(name) if self.described else None
        needed = description.ranks() if description else set(range(self.world))
        missing = sorted(needed - item.files.keys())
        if missing and (description or item.files.keys() != {0} or self._has_tensors(name)):
            raise lacking(self.directory.path, missing, {rank: file.path for rank, file in item.files.items()})

    def _read_rank(self, rank: int, files: Mapping[str, ItemFile]) -> None:
        pieces: dict[Path, Piece] = {}
        values: dict[Path, Any] = {}
        alone: dict[Path, Any] = {}
        meshes: dict[Mesh, None] = {}
        world = self.world
        places = {name: self._place(item_file) for name, item_file in files.items()}
        pickled = [name for name, item_file in files.items() if item_file.kind == TORCH]
        read = dict(zip(pickled, ahead(read_torch, [places[name] for name in pickled]), strict=True))
        for name, item_file in files.items():
            prefix = () if self._is_whole(name) else (name,)
            description = self.described.items.get(name) if self.described else None
            if item_file.kind == TORCH:
                file = read.pop(name)
                reader = Pieces(places[name].path, rank, bytes_of(places[name]))
                tensors, others = divided(file.value, reader, prefix)
                if reader.said not in (None, rank):
                    raise CorruptError(
                        f"{places[name]} has the name of rank {rank}, but records that it belongs to rank "
                        f"{reader.said}."
                    )
                self.files.log.add(file, item_file.path)
                meshes.update(reader.meshes)
                world = max(world, reader.world)
            elif item_file.kind == SAFETENSORS:
                tensors, others = self._stored(name, item_file, description), {}
            else:
                tensors, others = {}, {prefix: self._value(item_file)}
            if description:
                tensors = self._placed(name, item_file, rank, tensors, description)
                meshes.update((piece.layout.mesh, None) for piece in tensors.values() if isinstance(piece, RankPart))
            elif item_file.kind == SAFETENSORS and self.world > 1:
                raise UnsupportedError(
                    f"{places[name]} contains the parts of {count_of(len(tensors), 'tensor')} on rank {rank}, but "
                    f"there is no {STEP_METADATA} that records where these parts belong.",
                    f"Copy {STEP_METADATA} too. A step that was saved without a resharder has no {STEP_METADATA}, "
                    "and cannot be joined.",
                )
            pieces.update(tensors)
            (alone if self.items[name].shared else values).update(others)
            self.files.ranks.parts.update({(rank, at[0]): item_file.path for at in (*tensors, *others) if at})
        ranks = self.files.ranks
        ranks.add(rank, next(iter(files.values())).path, pieces, meshes, world)
        ranks.add_values(rank, values)
        ranks.values.update(alone)

    def _is_whole(self, name: str) -> bool:
        """Return whether an item is the whole state of a rank. Paths then do not begin with its name."""
        return name == _WHOLE and sum(item.has_tensors for item in self.items.values()) == 1

    def _value(self, file: ItemFile) -> Any:
        place = self._place(file)
        if file.kind == RAW and place.kind == "file" and place.entry.file.size > MAX_VALUE:
            self.large.append(file.path)
            return None
        data = self._bytes(file.path, MAX_VALUE)
        return data if file.kind == RAW else parsed_json(data, place.path)

    # --------------------------------------------------------------------------------------------------- safetensors

    def _stored(self, name: str, file: ItemFile, description: DescribedItem | None) -> dict[Path, Piece]:
        """Return the tensors of a safetensors file, whose names are paths joined by dots."""
        place = self._place(file)
        header = safetensors.header_of(place)
        self.files.log.bytes_read += header.bytes_read
        self.files.log.inputs[file.path] = header.identity
        paths: dict[str, Path] = {}
        for path, way in description.ways.items() if description else ():
            if paths.setdefault(names_of.dotted(path), way) != way:
                raise CorruptError(
                    f"{place}: two tensors of {named(name)} are stored as {named(names_of.dotted(path))}."
                )
        tensors: dict[Path, Piece] = {}
        for stored_name, stored in header.tensors.items():
            way = paths.get(stored_name, (stored_name,))
            facts = TensorFacts(
                storage=(place.path, stored_name),
                storage_nbytes=stored.nbytes,
                strides=stored.strides,
            )
            tensors[(name, *way)] = Whole(Tagged(stored, facts))
        return tensors

    # ------------------------------------------------------------------------------------------------- the metadata

    def _placed(
        self, name: str, file: ItemFile, rank: int, tensors: Mapping[Path, Piece], description: DescribedItem
    ) -> dict[Path, Piece]:
        """Return a rank's tensors of an item, each as the metadata describes it.

        For a plain tensor, the metadata describes rank 0: it says that all ranks have the tensor, or nothing if rank 0
        lacks it, as with pipeline stages. Raise CorruptError if file and metadata disagree otherwise.
        """
        where = f"{self._place(file)}"
        placed: dict[Path, Piece] = {}
        # Local tensors are known to be whole only if other stages exist.
        staged = rank > 0 and (file.kind == TORCH or description.has_stages())
        expected = {
            path
            for path, groups in description.tensors.items()
            if any(rank in ranks and not (rank and _is_replica(part, self.world)) for ranks, part in groups)
        }
        for path, piece in tensors.items():
            at = text_path(path[1:])
            geometry = description.geometry(at, rank)
            if geometry is None:
                if staged and self._of_stage(path, piece, description):
                    placed[path] = piece
                    continue
                raise other_save(
                    f"{where} has {named(names_of.dotted(path))}, which {STEP_METADATA} does not describe."
                )
            expected.discard(at)
            if isinstance(geometry, Rectangles) and path not in self._boxes:
                every = (part.boxes for _, part in description.tensors[at] if isinstance(part, Rectangles))
                self._boxes[path] = frozenset((box.offsets, box.sizes) for boxes in every for box in boxes)
            placed[path] = self._described(where, path, rank, piece, geometry)
        if expected:
            lost = names_of.dotted((name, *min(expected)))
            raise other_save(f"{where} lacks {named(lost)}, which {STEP_METADATA} describes.")
        return placed

    def _of_stage(self, path: Path, piece: Piece, description: DescribedItem) -> bool:
        """Return whether a tensor is plain and not on rank 0: the metadata describe no such tensor."""
        is_of_stage = isinstance(piece, Whole) and text_path(path[1:]) not in description.tensors
        is_of_stage = is_of_stage and 0 not in self.files.ranks.pieces.get(path, ())
        if is_of_stage:
            self.undescribed.append(names_of.dotted(path))
        return is_of_stage

    def _described(self, where: str, path: Path, rank: int, piece: Piece, geometry: Geometry) -> Piece:
        """Return a piece with the geometry in the metadata."""
        name = names_of.dotted(path)
        tensor = piece.tensor if isinstance(piece, (Whole, RankPart)) else None
        said: Any = geometry.shape, geometry.dtype.name
        if isinstance(piece, RankPart):
            its = piece.layout
            has: Any = its.shape, piece.tensor.dtype.name
            if isinstance(geometry, Distributed):
                stated = geometry.layout.placements
                said = (*said, geometry.layout.mesh[:2], stated)
                # If 0.1.0 states no stride, there may be one.
                plain = tuple(
                    cut and (cut._replace(factor=1) if stated_cut and stated_cut.factor == 1 else cut)
                    for cut, stated_cut in zip(its.placements, stated, strict=False)
                )
                has = (*has, its.mesh[:2], plain)
            agrees = has == said and isinstance(geometry, Distributed)
        elif tensor is None:
            agrees = False
        else:
            agrees = tensor.dtype.name == geometry.dtype.name and len(tensor.shape) == len(geometry.shape)
        if not agrees:
            described = _described_as(geometry.shape, geometry.dtype.name, geometry)
            own = _described_as(shape_of(piece), None if tensor is None else tensor.dtype.name, piece)
            if isinstance(piece, Whole) and len(geometry.shape) == len(piece.tensor.shape):
                own["the shape"] = described["the shape"]  # the metadata describe the whole, of which it is a part
            odd = [key for key, value in own.items() if described.get(key) != value]
            texts = [", ".join(f"{key} {facts[key]}" for key in odd if key in facts) for facts in (own, described)]
            raise other_save(
                f"{where} has {named(name)} with {texts[0]}, but {STEP_METADATA} describes it with "
                f"{texts[1] or 'another distribution'}."
            )
        if isinstance(piece, RankPart) or tensor is None:
            return piece
        if isinstance(geometry, Distributed):
            layout = geometry.layout
            if tensor.shape == layout.shape and not any(layout.placements):
                return piece
            self._check_order(where, name, layout)
            inside = rank in layout.mesh.ranks
            return RankPart(layout, layout.mesh.coordinate(rank) if inside else None, tensor)
        return self._cut(where, name, tensor, geometry, self._boxes[path])

    def _check_order(self, where: str, name: str, layout: Distribution) -> None:
        """Raise UnsupportedError if several mesh dimensions cut one dimension of the tensor, in an unknown order."""
        cuts = zip(layout.placements, layout.mesh.shape, strict=True)
        dims = [cut.dim for cut, ranks in cuts if cut and ranks > 1]
        if len(set(dims)) < len(dims) and not (self.described and self.described.knows_strides):
            raise UnsupportedError(
                f"{where}: {named(name)} is split along one dimension by {len(dims)} dimensions of its mesh, "
                f"but {STEP_METADATA} does not contain their order: torch_checkpointing 0.1.0 did not record it.",
                "Save it with a later release, or with torch.save, which record the order.",
            )

    @staticmethod
    def _cut(
        where: str, name: str, tensor: Tagged, geometry: Rectangles, every: frozenset[tuple[Shape, Shape]]
    ) -> Piece:
        """Return a rank's boxes of a tensor; `every` are the boxes of all ranks."""
        tiles = []
        for box in geometry.boxes:
            if any(at + size > most for at, size, most in zip(box.inside, box.sizes, tensor.shape, strict=True)):
                raise CorruptError(
                    f"{where}: the part of {named(name)} has the shape {list(tensor.shape)}, but {STEP_METADATA} "
                    f"describes a shard of {list(box.sizes)} at {list(box.inside)} in it."
                )
            part: LazyTensor = tensor
            if box.sizes != tensor.shape:
                part = tensor.tensor
                for dim, (start, size) in enumerate(zip(box.inside, box.sizes, strict=True)):
                    if size != part.shape[dim]:
                        part = Narrow(part, dim, start, size)
            tiles.append(ChunkTile(box.offsets, part))
        return Shards(geometry.shape, every, tuple(tiles))

    # ------------------------------------------------------------------------------------------------------- reports

    def facts(self, path: str) -> dict[str, Any]:
        ranks = self.files.ranks
        shapes = list(dict.fromkeys(str(mesh) for meshes in ranks.meshes.values() for mesh in meshes))
        return {
            **({} if self.directory.path == path else {"directory": self.directory.path}),
            "ranks": self.world,
            **({"mesh": ", ".join(shapes)} if shapes else {}),
            "items": ", ".join(self.items),
            "files": len(self.files.log.inputs),
            "metadata": f"version {self.version}"
            if self.version
            else "none: torch_checkpointing cannot reshard the step",
        }

    def told(self, wanted: Wanted, chosen: list[Path]) -> tuple[list[str], list[str]]:
        """Return notes and warnings on items that were left out, and on differences between the ranks."""
        ranks = self.files.ranks
        notes: list[str] = []
        warnings: list[str] = []
        if not wanted.key:
            names = dict.fromkeys([*self.unread, *(str(at[0]) for at in ranks.paths())])
            left = [name for name in names if not any(at[0] == name for at in chosen)]
            states = [name for name in left if names_of.is_optimizer(name)]
            left = [name for name in left if not (wanted.states and name in states)]
            odd = [name for name in left if self.unread.get(name) and name not in states]
            for sentences, left_out in ((notes, [name for name in left if name not in odd]), (warnings, odd)):
                if left_out:
                    has_states = not set(states).isdisjoint(left_out)
                    sentences.append(left_by_key(some(left_out), left_out, has_states))
        missing = sorted(ranks.expected - ranks.files.keys())
        if missing:
            warnings.append(
                f"Files of these ranks are missing: {some(missing, form=str)}. The files of the other ranks contain "
                "the same data."
            )
        differing = [path for path in ranks.differing if wanted.key or path in chosen]
        if differing:
            warnings.append(
                f"Values other than tensors differ between the ranks. The values of rank {min(ranks.files)} were used: "
                f"{some([names_of.dotted(path) for path in differing])}."
            )
        if self.undescribed:
            warnings.append(
                f"{STEP_METADATA} does not describe plain tensors that rank 0 lacks. The whole tensors of other ranks "
                f"were used: {some([*dict.fromkeys(self.undescribed)])}."
            )
        if self.large:
            warnings.append(f"Left out: {some(self.large)}, larger than {format_size(MAX_VALUE)}.")
        return notes, warnings
