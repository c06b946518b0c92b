"""Joins the files of all ranks into one state, and proves that it is complete. Pure.

A distributed tensor is joined from the chunks of the ranks of its mesh, as the chunks of DCP are. If several ranks hold
a chunk, or a whole tensor, the first copy is taken, and the others are compared with it when its bytes are read. All
ranks must hold the same names, except ranks of different meshes, such as those of pipeline stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.joining.chunks import ChunkTile, Shape
from ckptconv.features.joining.chunks import join as join_tiles
from ckptconv.features.joining.layouts import Distribution, Mesh, boxes, by_shards, extents, spans
from ckptconv.features.joining.names import Path, Roles, dotted, named
from ckptconv.features.joining.pieces import Piece, RankPart, Shards, Whole, parts_of, shape_of
from ckptconv.structure import keymap
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import Equal, LazyTensor, Narrow, Tagged, untagged
from ckptconv.text import some


@dataclass
class JoinedRanks:
    """The tensors of all ranks, joined, and the copies that must equal them."""

    tensors: dict[Path, LazyTensor] = field(default_factory=dict)
    equal: list[Equal] = field(default_factory=list)


@dataclass
class Ranks:
    """The contents of the files of all ranks, added one after the other. `files` are their names by rank.

    `meshes` are those of each rank; `expected` are all ranks that the files mention. `values` are the first rank's
    values other than tensors; `differing` are the paths of values that are different on another rank. `ready` are
    tensors of flat parameters, which are joined already, and `equal` the tensors that must be equal in them. If each
    rank has several files, `parts` are their names by rank and by the first step of the paths in them.
    """

    where: str
    files: dict[int, str] = field(default_factory=dict)
    parts: dict[tuple[int, str | int], str] = field(default_factory=dict)
    pieces: dict[Path, dict[int, Piece]] = field(default_factory=dict)
    meshes: dict[int, tuple[Mesh, ...]] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    differing: dict[Path, None] = field(default_factory=dict)
    expected: set[int] = field(default_factory=set)
    ready: dict[Path, LazyTensor] = field(default_factory=dict)
    equal: list[Equal] = field(default_factory=list)
    _written: dict[Path, str | None] = field(default_factory=dict)
    _layouts: dict[Any, Any] = field(default_factory=dict)

    def add(self, rank: int, file: str, pieces: Mapping[Path, Piece], meshes: Iterable[Mesh], world: int) -> None:
        """Add the pieces of a rank, one of `world` unless that is 0. Raise CorruptError if it has a file already."""
        if rank in self.files:
            raise other_save(
                f"{self.where}: {self.files[rank]} and {file} both belong to rank {rank}: one of them is a copy."
            )
        self.files[rank] = file
        self.expected.update(range(world), *(mesh.ranks for mesh in meshes))
        self.meshes[rank] = tuple(self._layouts.setdefault(mesh, mesh) for mesh in meshes)
        for path, piece in pieces.items():
            self.pieces.setdefault(path, {})[rank] = self._shared(piece)

    def add_values(self, rank: int, values: Mapping[Path, Any]) -> None:
        """Add the values of a rank that are not tensors; compare them with those of the other ranks."""
        is_first = len(self.files) == 1
        for path, value in values.items():
            written = keymap.describe({"": value}).structure
            if not is_first and self._written.get(path, "") != written:
                self.differing[path] = None
            if path not in self._written:
                self.values[path], self._written[path] = value, written
        self.differing.update(dict.fromkeys(path for path in self._written if path not in values))

    def file_of(self, rank: int, path: Path) -> str:
        """Return the name of the file in which a rank has the piece at `path`."""
        return self.parts.get((rank, path[0]), self.files[rank])

    def paths(self) -> Iterator[Path]:
        """Yield the paths of all tensors and values."""
        yield from self.pieces
        yield from self.ready
        yield from self.values

    def _shared(self, piece: Piece) -> Piece:
        """Return `piece` with the layout or the list of shards of an equal piece, if there is one: many are equal."""
        if isinstance(piece, RankPart):
            return piece._replace(layout=self._layouts.setdefault(piece.layout, piece.layout))
        if isinstance(piece, Shards):
            return piece._replace(boxes=self._layouts.setdefault(piece.boxes, piece.boxes))
        return piece

    # ---------------------------------------------------------------------------------------------------------- names

    def check_names(self, known: Collection[str | int] = ()) -> None:
        """Raise CorruptError unless ranks of the same meshes hold the same names. Below the `known` first steps of
        paths, the caller knows from elsewhere which rank holds which names.

        A rank without any tensor may lack all names: a gathered state dict is on the first rank alone. Any rank may
        lack plain states of an optimizer: under FSDP1, it has none of a parameter of which it holds nothing. The caller
        proves that these states are complete.
        """
        optimizers = Roles.of([*self.paths()], [*self.pieces])
        filled = {rank for by_rank in self.pieces.values() for rank in by_rank}
        alike: dict[Any, list[int]] = {}
        for rank, meshes in sorted(self.meshes.items()):
            if rank not in filled:
                continue
            members = frozenset(member for mesh in meshes for member in mesh.ranks)
            alike.setdefault(members or None, []).append(rank)
        for ranks in alike.values():
            for path, by_rank in self.pieces.items() if len(ranks) > 1 else ():
                those = [rank for rank in ranks if not self.parts or (rank, path[0]) in self.parts]
                those = [] if path[0] in known else those
                have = [rank for rank in those if rank in by_rank]
                is_plain = all(isinstance(piece, Whole) for piece in by_rank.values())
                if have and len(have) < len(those) and not (is_plain and optimizers.optimizer_of(path) is not None):
                    lacking = next(rank for rank in those if rank not in by_rank)
                    raise other_save(
                        f"{self.where}: {self.file_of(have[0], path)} has {named(dotted(path))}, but "
                        f"{self.file_of(lacking, path)} does not."
                    )

    # -------------------------------------------------------------------------------------------------------- joining

    def join(self, paths: Iterable[Path]) -> JoinedRanks:
        """Return the tensors at `paths`.

        Raise CorruptError if pieces are missing, overlap, or contradict each other; UnsupportedError if ranks have
        local parts that nothing describes.
        """
        joined = JoinedRanks(equal=list(self.equal))
        ties: dict[Any, LazyTensor] = {}
        for path in paths:
            if path in self.ready:
                joined.tensors[path] = self.ready[path]
                continue
            by_rank = self.pieces[path]
            # Names of one tensor share the storages of all ranks.
            key = tuple((rank, _how(piece), *map(_place, parts_of(piece))) for rank, piece in by_rank.items())
            known = ties.get(key) if all(len(part) == 3 and part[2] is not None for part in key) else None
            if known is not None:
                joined.tensors[path] = known
                continue
            tensor = self._joined(path, by_rank, joined.equal)
            joined.tensors[path] = tensor
            if tensor.numel:
                ties[key] = tensor
        return joined

    def _joined(self, path: Path, by_rank: Mapping[int, Piece], equal: list[Equal]) -> LazyTensor:
        name = dotted(path)
        first = min(by_rank)
        sample = by_rank[first]
        for rank, piece in sorted(by_rank.items()):
            self._check_alike(path, first, sample, rank, piece)
        wholes = []
        if isinstance(sample, Whole):
            wholes = [piece.tensor for _, piece in sorted(by_rank.items())]  # type: ignore[union-attr]
        elif isinstance(sample, Shards):
            wholes = [self._from_shards(name, by_rank, equal)]  # type: ignore[arg-type]
        else:
            groups: dict[Mesh, dict[int, RankPart]] = {}
            for rank, piece in sorted(by_rank.items()):
                groups.setdefault(piece.layout.mesh, {})[rank] = piece  # type: ignore[union-attr,assignment]
            wholes = [self._from_mesh(path, parts, equal) for parts in groups.values()]
        equal.extend((name, untagged(wholes[0]), untagged(copy)) for copy in wholes[1:])
        return wholes[0]

    def _check_alike(self, path: Path, first: int, expected: Piece, rank: int, piece: Piece) -> None:
        """Raise CorruptError unless the pieces of two ranks have the same kind, dtype and shape."""
        kinds = {Whole: "whole", RankPart: "as a DTensor", Shards: "as a ShardedTensor"}
        descriptions = [(kinds[type(side)], str(_dtype(side)), list(shape_of(side))) for side in (expected, piece)]
        if isinstance(expected, Shards) and isinstance(piece, Shards) and expected.boxes != piece.boxes:
            descriptions[1] = ("in other shards", *descriptions[1][1:])
        if None not in (_dtype(expected), _dtype(piece)) and descriptions[0] != descriptions[1]:
            texts = [f"{dtype} {shape}, {how}" for how, dtype, shape in descriptions]
            raise other_save(
                f"{self.where}: {named(dotted(path))} is {texts[0]}, in {self.file_of(first, path)}, but {texts[1]}, "
                f"in {self.file_of(rank, path)}."
            )

    def _from_mesh(self, path: Path, parts: Mapping[int, RankPart], equal: list[Equal]) -> LazyTensor:
        name = dotted(path)
        layouts = {part.layout for part in parts.values()}
        if len(layouts) > 1:
            raise other_save(f"{self.where}: the ranks record different meshes or placements of {named(name)}.")
        layout = layouts.pop()
        inside = {rank: part for rank, part in parts.items() if part.coordinate is not None}
        chosen = self._fitting(path, layout, inside)
        tiles: list[ChunkTile] = []
        for part in inside.values():
            indices = spans(chosen, part.coordinate or ())
            for box in boxes(indices):
                tensor: LazyTensor = untagged(part.tensor)
                for dim, (start, size) in enumerate(zip(box.inside, box.sizes, strict=True)):
                    if size != tensor.shape[dim]:
                        tensor = Narrow(tensor, dim, start, size)
                tiles.append(ChunkTile(box.offsets, tensor))
        return self._filled(name, next(iter(parts.values())).tensor.dtype, layout.shape, tiles, equal)

    def _fitting(self, path: Path, layout: Distribution, parts: Mapping[int, RankPart]) -> Distribution:
        """Return the layout that fits the shapes of the ranks' parts: the stated one, or, if that has strides, the same
        cuts in another order."""
        reordered = by_shards(layout) if any(cut and cut.factor > 1 for cut in layout.placements) else None
        fits = []
        wrong: tuple[int, Shape] | None = None
        for candidate in (layout, *([reordered] if reordered else [])):
            by_rank = {rank: spans(candidate, part.coordinate or ()) for rank, part in parts.items()}
            shapes = {rank: extents(indices) for rank, indices in by_rank.items()}
            bad = [(rank, shape) for rank, shape in shapes.items() if shape != parts[rank].tensor.shape]
            wrong = wrong or (bad[0] if bad else None)
            if not bad:
                fits.append((candidate, by_rank))
        if not fits and wrong:
            rank, shape = wrong
            raise CorruptError(
                f"{self.where}: {self.file_of(rank, path)} has a part of shape {list(parts[rank].tensor.shape)} of "
                f"{named(dotted(path))}, but the placements on a mesh of {layout.mesh} give this rank the shape "
                f"{list(shape)} of {list(layout.shape)}."
            )
        if len(fits) == 2 and fits[0][1] != fits[1][1]:
            raise UnsupportedError(
                f"{self.where}: {named(dotted(path))} is split unevenly along several dimensions of its mesh, but "
                "its placements do not record the order.",
                "Save it with torch.distributed.checkpoint, or gather whole tensors before saving.",
            )
        return fits[0][0]

    def _from_shards(self, name: str, by_rank: Mapping[int, Shards], equal: list[Equal]) -> LazyTensor:
        tiles = [tile for _, piece in sorted(by_rank.items()) for tile in piece.tiles]
        sample = by_rank[min(by_rank)]
        dtypes = [tile.tensor.dtype for tile in tiles]
        if not dtypes:
            raise CorruptError(f"{self.where}: no rank has a shard of {named(name)}.")
        bare = [ChunkTile(tile.offsets, untagged(tile.tensor)) for tile in tiles]
        return self._filled(name, dtypes[0], sample.shape, bare, equal)

    def _filled(
        self,
        name: str,
        dtype: DType,
        shape: Shape,
        tiles: Iterable[ChunkTile],
        equal: list[Equal],
    ) -> LazyTensor:
        """Join the tiles, each once. Further tiles of the same place must equal the first."""
        once: dict[tuple[Shape, Shape], LazyTensor] = {}
        for tile in tiles:
            if tile.tensor.numel:
                kept = once.setdefault((tile.offsets, tile.tensor.shape), tile.tensor)
                if kept is not tile.tensor:
                    equal.append((name, kept, tile.tensor))
        missing = sorted(self.expected - self.files.keys())
        try:
            return join_tiles(
                dtype, shape, [ChunkTile(at, tensor) for (at, _), tensor in once.items()], lambda: self._named(name)
            )
        except CorruptError as error:
            if not missing:
                raise
            raise lacking(self.where, missing, self.files) from error

    def _named(self, name: str) -> str:
        return f"{self.where}: {named(name)}"


def other_save(message: str) -> CorruptError:
    """Return the error for files that contradict one another."""
    return CorruptError(
        message, "The files come from different saves: copy the files of one save, from all ranks, to a new directory."
    )


def lacking(where: str, missing: list[int], files: Mapping[int, str]) -> CorruptError:
    """Return the error for ranks without a file; `files` are those that exist."""
    noun, held = ("rank" if len(ranks) == 1 else "ranks" for ranks in (missing, files))
    return CorruptError(
        f"{where} contains files of {len(files)} {held}, but lacks {'that' if len(missing) == 1 else 'those'} of "
        f"{noun} {some(missing, form=str)}.",
        "Copy the files of all ranks to one place.",
    )


def _dtype(piece: Piece) -> DType | None:
    """Return the dtype; None for a rank without shards."""
    return next((tensor.dtype for tensor in parts_of(piece)), None)


def _how(piece: Piece) -> Any:
    """Return how a tensor is distributed."""
    return piece.layout if isinstance(piece, RankPart) else piece.boxes if isinstance(piece, Shards) else None


def _place(tensor: LazyTensor) -> Any:
    """Return the identity of the elements of a stored tensor."""
    facts = tensor.facts if isinstance(tensor, Tagged) else None
    return facts and (facts.storage, facts.storage_offset, facts.strides, tensor.shape)


def distributed(pieces: Mapping[Path, Mapping[int, Piece]]) -> Iterator[Path]:
    """Yield the paths of tensors that are not whole on each rank."""
    return (path for path, by_rank in pieces.items() if any(not isinstance(piece, Whole) for piece in by_rank.values()))
