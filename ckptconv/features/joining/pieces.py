"""A rank's part of each tensor, read as data from the rank's pickle: DTensor and ShardedTensor.

Source: torch/distributed/tensor/_api.py, device_mesh.py and _shard/sharded_tensor/ of torch 2.1 to 2.13. Both are
wrappers. A DTensor has `_local_tensor` and a `_spec` of mesh, placements and shape. A ShardedTensor has its local
shards, each with offsets and sizes, and the list of all shards. Until torch 2.10, a mesh had a tensor of ranks; since
then it has a layout: strides into the ranks of the mesh that it was sliced from.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, LimitError, UnsupportedError
from ckptconv.features.joining.chunks import ChunkTile, Shape
from ckptconv.features.joining.layouts import Distribution, Mesh, MeshCut, unravelled
from ckptconv.features.joining.names import named
from ckptconv.pickles.nodes import Composite, Opaque, class_of
from ckptconv.tensors.lazy import LazyTensor, Stored, Tagged
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS
from ckptconv.text import brief

# The most ranks of a mesh, and the most pieces into which a strided placement cuts a dimension.
MAX_RANKS, MAX_FACTOR = 1 << 16, 1 << 12
_INTEGERS = {"int64": "q", "int32": "i"}
# Reads the bytes of a small tensor.
ReadBytes: TypeAlias = Callable[[Stored], bytes]


class Whole(NamedTuple):
    """A tensor that a rank has whole, or that no record describes as a part."""

    tensor: Tagged


class RankPart(NamedTuple):
    """A rank's part of a tensor that is distributed by `layout`. `coordinate` is None for a rank outside the mesh."""

    layout: Distribution
    coordinate: Shape | None
    tensor: Tagged


class Shards(NamedTuple):
    """A rank's shards of a tensor of `shape`; `boxes` are the offsets and sizes of all ranks' shards."""

    shape: Shape
    boxes: frozenset[tuple[Shape, Shape]]
    tiles: tuple[ChunkTile, ...]


Piece: TypeAlias = "Whole | RankPart | Shards"


def is_distributed(node: Any) -> bool:
    """Return whether a node is a DTensor or a ShardedTensor."""
    return type(node) is Composite and _kind(node) in ("DTensor", "ShardedTensor")


def is_partial(node: Composite) -> bool:
    """Return whether a DTensor is partial: its values are a reduction, such as the sum, of all ranks' values."""
    placements = attributes(_attributes_of(node).get("_spec")).get("placements")
    return isinstance(placements, (tuple, list)) and any("Partial" in _kind(placement) for placement in placements)


def _kind(node: Any) -> str:
    """Return the name of a class of torch.distributed; "" for other classes."""
    name = class_of(node) if type(node) is Composite else node.name if type(node) is Opaque else ""
    return name.rpartition(".")[2] if name.startswith("torch.") and "istributed" in name else ""


def attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an object as its pickle has them: in a dict, or in a dict and a dict of slots."""
    state = node.state[-1] if type(node) is Opaque and node.state else None
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    return {name: value for part in parts if type(part) is dict for name, value in part.items()}


@dataclass
class Pieces:
    """Reads the distributed tensors of one file. The rank with the number `rank` in the file's name wrote it.

    `meshes` are all that the file mentions. `said` is the rank in the file's content; None if there is none. `world` is
    the number of ranks in it, 0 if there is none.
    """

    where: str
    rank: int
    read: ReadBytes
    meshes: dict[Mesh, None] = field(default_factory=dict)
    said: int | None = None
    world: int = 0
    _known: dict[int, tuple[Mesh, Shape | None]] = field(default_factory=dict)
    _lists: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _slices: dict[Any, tuple[Shape, tuple[int, ...]]] = field(default_factory=dict)

    def of(self, name: str, node: Composite) -> Piece:
        """Return the piece that `node`, a distributed tensor called `name`, holds.

        Raise CorruptError if it contradicts itself, UnsupportedError for placements whose values are in no file.
        """
        if _kind(node) == "DTensor":
            return self._part(name, node)
        return self._shards(name, node)

    def _corrupt(self, name: str, reason: str) -> CorruptError:
        return CorruptError(f"{self.where}: {named(name)} {reason}.")

    def _says(self, rank: int) -> None:
        if self.said not in (None, rank):
            raise CorruptError(
                f"{self.where} records that it belongs to rank {self.said}, and that it belongs to rank {rank}."
            )
        self.said = rank

    # ------------------------------------------------------------------------------------------------------- DTensor

    def _part(self, name: str, node: Composite) -> RankPart:
        attrs = _attributes_of(node)
        spec = attributes(attrs.get("_spec"))
        shape = self._counts(name, node.parts["shape"], "a shape")
        meta = spec.get("tensor_meta")
        stated = meta.args[0] if type(meta) is Opaque and type(meta.args) is tuple and meta.args else shape
        if self._counts(name, stated, "a shape") != shape:
            raise self._corrupt(name, f"has the shape {list(shape)}, but its spec records {list(stated)}")
        tensor = self._local(name, attrs.get("_local_tensor"), node)
        mesh, coordinate = self._mesh(name, spec.get("mesh"))
        listed = spec.get("placements")
        if not isinstance(listed, (tuple, list)) or len(listed) != len(mesh.shape):
            raise self._corrupt(name, f"has placements {brief(listed)}, but a mesh of {len(mesh.shape)} dimensions")
        placements = tuple(self._placement(name, placement, shape) for placement in listed)
        if math.prod(cut.factor for cut in placements if cut) > MAX_FACTOR:
            raise LimitError(
                f"{self.where}: {named(name)} is split into more than {MAX_FACTOR} strided pieces, which is the limit."
            )
        order = self._order(name, spec.get("shard_order"), placements)
        return RankPart(Distribution(mesh, placements, shape, order), coordinate, tensor)

    def _local(self, name: str, node: Any, wrapper: Composite) -> Tagged:
        if type(node) is not Tagged:
            kind = class_of(node) or type(node).__name__
            raise UnsupportedError(
                f"{self.where}: the local part of {named(name)} is a {kind[:200]}; only ordinary tensors can be "
                "joined.",
                "Gather whole tensors before saving, or save with torch.distributed.checkpoint.",
            )
        dtype = wrapper.parts["dtype"].name
        if dtype != node.dtype.name:
            raise self._corrupt(name, f"has the dtype {dtype}, but its local part has {node.dtype}")
        return node

    def _counts(self, name: str, value: Any, subject: str) -> Shape:
        if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
            raise self._corrupt(name, f"has {subject} {brief(value)} that is not valid")
        if any(type(count) is not int or not 0 <= count < MAX_BYTES for count in value) or (
            math.prod(value) >= MAX_BYTES
        ):
            raise self._corrupt(name, f"has {subject} {brief(tuple(value))} that is not valid")
        return tuple(value)

    def _placement(self, name: str, node: Any, shape: Shape) -> MeshCut | None:
        kind, attrs = _kind(node), attributes(node)
        if kind == "Replicate":
            return None
        if kind not in ("Shard", "_StridedShard"):
            shown = kind or type(node).__name__
            raise UnsupportedError(f"{self.where}: {named(name)} has the unknown placement {shown[:100]}.")
        args = node.args if type(node.args) is tuple else ()
        dim = attrs.get("dim", args[0] if args else None)
        factor = attrs.get("split_factor", args[1] if len(args) > 1 else 1) if kind == "_StridedShard" else 1
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise self._corrupt(name, f"is sharded along dimension {brief(dim)}, but has {len(shape)} dimensions")
        if type(factor) is not int or factor < 1:
            raise self._corrupt(name, f"has a strided placement with the invalid split factor {brief(factor)}")
        if factor > MAX_FACTOR:
            raise LimitError(
                f"{self.where}: {named(name)} is split into {factor} strided pieces; at most "
                f"{MAX_FACTOR} are supported."
            )
        return MeshCut(dim, factor)

    def _order(self, name: str, entries: Any, placements: tuple[MeshCut | None, ...]) -> tuple[int, ...]:
        """Return the mesh dimensions in the order in which they cut the tensor; () if that is their own order."""
        if type(entries) is not tuple:
            return ()
        order: list[int] = []
        for entry in entries:
            if type(entry) is not Opaque or type(entry.args) is not tuple or len(entry.args) != 2:
                return ()
            dim, mesh_dims = entry.args
            for at in mesh_dims if type(mesh_dims) is tuple else ():
                cut = placements[at] if type(at) is int and 0 <= at < len(placements) else None
                if cut is None or cut.dim != dim or at in order:
                    raise self._corrupt(
                        name, f"has a shard order, {brief(mesh_dims)}, that does not match its placements"
                    )
                order.append(at)
        if len(order) != sum(cut is not None for cut in placements):
            raise self._corrupt(name, "has a shard order that lacks some of its placements")
        return () if order == sorted(order) else tuple(order)

    # ---------------------------------------------------------------------------------------------------------- mesh

    def _mesh(self, name: str, node: Any) -> tuple[Mesh, Shape | None]:
        """Return a device mesh, and the indices of this rank in it; None for a rank outside the mesh."""
        known = self._known.get(id(node))
        if known is None:
            known = self._known[id(node)] = self._read_mesh(name, attributes(node))
            self.meshes[known[0]] = None
        return known

    def _read_mesh(self, name: str, attrs: Mapping[str, Any]) -> tuple[Mesh, Shape | None]:
        stated = attrs.get("_coordinate_on_dim")
        rank = attrs.get("_rank")
        if type(rank) is int:
            self._says(rank)
        if type(attrs.get("mesh")) is Tagged:
            shape = attrs["mesh"].shape
            ranks = self._ranks(name, attrs["mesh"], attrs.get("_flatten_mesh_list"))
        else:
            every = self._ranks(name, attrs.get("_rank_map"), attrs.get("_flatten_rank_map"))
            own_rank = self.rank if self.said is None else self.said
            shape, ranks = self._sliced(name, attrs.get("_layout"), every, own_rank)
        names = attrs.get("_mesh_dim_names", attrs.get("mesh_dim_names"))
        named_dims = names if type(names) in (tuple, list) and len(names) == len(shape) else ()
        if math.prod(shape) != len(ranks) or not ranks:
            raise self._corrupt(name, f"is on a mesh of shape {list(shape)} that lists {len(ranks)} ranks")
        mesh = Mesh(ranks, shape, tuple(map(str, named_dims)))
        if stated is None:
            return mesh, mesh.coordinate(self.said) if self.said in ranks else None
        coordinate = tuple(stated) if type(stated) in (tuple, list) else ()
        if len(coordinate) != len(shape) or any(
            type(at) is not int or not 0 <= at < extent for at, extent in zip(coordinate, shape, strict=True)
        ):
            raise self._corrupt(name, f"is at {brief(stated)}, which is not in its mesh of shape {list(shape)}")
        at = 0
        for index, extent in zip(coordinate, shape, strict=True):
            at = at * extent + index
        self._says(ranks[at])
        return mesh, coordinate

    def _ranks(self, name: str, tensor: Any, listed: Any) -> tuple[int, ...]:
        """Return the ranks of a mesh: from their list, which most releases write, or from their tensor."""
        key = id(tensor if listed is None else listed)
        if key in self._lists:
            return self._lists[key]
        ranks = tuple(listed) if isinstance(listed, (tuple, list)) else self._numbers(name, tensor)
        if len(ranks) > MAX_RANKS or any(type(rank) is not int or rank < 0 for rank in ranks):
            most = f"{len(ranks)} ranks; at most {MAX_RANKS} are supported"
            raise self._corrupt(
                name, f"is on a mesh {f'of {most}' if len(ranks) > MAX_RANKS else 'with invalid ranks'}"
            )
        if len(set(ranks)) != len(ranks):
            raise self._corrupt(name, f"is on a mesh of {len(ranks)} ranks that lists a rank twice")
        self._lists[key] = ranks
        return ranks

    def _numbers(self, name: str, tensor: Any) -> tuple[int, ...]:
        stored = tensor.tensor if type(tensor) is Tagged else None
        if type(stored) is not Stored or stored.dtype.name not in _INTEGERS or not stored.contiguous:
            raise self._corrupt(name, "is on a mesh without a list of its ranks")
        if stored.numel > MAX_RANKS:
            raise self._corrupt(name, f"is on a mesh of {stored.numel} ranks; at most {MAX_RANKS} are supported")
        return struct.unpack(f"<{stored.numel}{_INTEGERS[stored.dtype.name]}", self.read(stored))

    def _sliced(self, name: str, node: Any, every: tuple[int, ...], rank: int) -> tuple[Shape, tuple[int, ...]]:
        """Return the shape and the ranks of the mesh with `rank` that a layout takes from `every` rank."""
        axes = self._axes(name, attributes(node))
        key = (id(every), tuple(axes), rank)
        if key not in self._slices:
            self._slices[key] = self._slice(name, axes, every, rank)
        return self._slices[key]

    def _slice(
        self, name: str, axes: list[tuple[Shape, Shape]], every: tuple[int, ...], rank: int
    ) -> tuple[Shape, tuple[int, ...]]:
        if rank not in every:
            raise self._corrupt(name, f"is on a mesh that does not include rank {rank}")
        position = every.index(rank)
        base = position - sum(
            position // stride % extent * stride for axis in axes for extent, stride in zip(*axis, strict=True)
        )
        shape = tuple(math.prod(extents) for extents, _ in axes)
        if math.prod(shape) > len(every):
            raise self._corrupt(name, f"is on a mesh of shape {list(shape)}, but only {len(every)} ranks are listed")
        offsets = []
        for extents, strides in axes:
            inner = (unravelled(at, extents) for at in range(math.prod(extents)))
            offsets.append([sum(map(int.__mul__, at, strides)) for at in inner])
        places = [base + sum(steps) for steps in itertools.product(*offsets)]
        if any(not 0 <= place < len(every) for place in places) or len(set(places)) != len(places):
            raise self._corrupt(
                name, f"is on a mesh that extends beyond its {len(every)} ranks, or contains a rank twice"
            )
        return shape, tuple(every[place] for place in places)

    def _axes(self, name: str, attrs: Mapping[str, Any]) -> list[tuple[Shape, Shape]]:
        """Return the extents and strides of each dimension of a mesh's layout."""
        listed = attrs.get("axes")
        if isinstance(listed, (tuple, list)):
            pairs = [(item.get("shape"), item.get("stride")) for item in map(attributes, listed)]
        else:
            shape, stride = (attrs.get(key, attrs.get(f"{key}s")) for key in ("shape", "stride"))
            shape = attrs.get("sizes") if shape is None else shape
            both = [item if type(item) is tuple else (item,) for item in (shape, stride)]
            if len(both[0]) != len(both[1]):
                raise self._corrupt(name, "is on a mesh with an invalid layout")
            pairs = list(zip(*both, strict=True))
        axes = []
        for extents, strides in pairs:
            pair = tuple(_flat(item) for item in (extents, strides))
            if len(pair[0]) != len(pair[1]) or len(pair[0]) > MAX_DIMS:
                raise self._corrupt(name, "is on a mesh with an invalid layout")
            if any(type(n) is not int or not 1 <= n <= MAX_RANKS for n in pair[0]) or any(
                type(n) is not int or not 0 <= n <= MAX_RANKS for n in pair[1]
            ):
                raise self._corrupt(
                    name, f"is on a mesh with invalid extents {brief(extents)} or strides {brief(strides)}"
                )
            kept = [(extent, stride) for extent, stride in zip(*pair, strict=True) if extent > 1]
            if any(not stride for _, stride in kept):
                raise self._corrupt(name, "is on a mesh that contains a rank twice")
            axes.append((tuple(extent for extent, _ in kept), tuple(stride for _, stride in kept)))
        if not axes or math.prod(extent for axis in axes for extent in axis[0]) > MAX_RANKS:
            raise self._corrupt(name, "is on a mesh whose layout is invalid or too large")
        return axes

    # ------------------------------------------------------------------------------------------------- ShardedTensor

    def _shards(self, name: str, node: Composite) -> Shards:
        state = node.parts.get("attributes")
        if type(state) is not tuple or len(state) != 5 or type(state[0]) is not list:
            raise self._corrupt(name, "is a ShardedTensor without its shards")
        local, metadata, group = state[0], attributes(state[1]), attributes(state[2])
        rank = group.get("global_rank")
        if type(rank) is int:
            self._says(rank)
        world = group.get("global_world_size")
        if type(world) is int and 0 < world <= MAX_RANKS:
            self.world = world
        shape = self._counts(name, metadata.get("size"), "a size")
        if shape != (whole := self._counts(name, node.parts["shape"], "a shape")):
            raise self._corrupt(name, f"has the shape {list(whole)}, but its metadata records {list(shape)}")
        listed = metadata.get("shards_metadata")
        if type(listed) is not list:
            raise self._corrupt(name, "is a ShardedTensor that does not list its shards")
        known = [self._box(name, attributes(box), shape) for box in listed]
        tiles = []
        for shard in local:
            attrs = attributes(shard)
            tensor = self._local(name, attrs.get("tensor"), node)
            offsets, sizes = self._box(name, attributes(attrs.get("metadata")), shape)
            if sizes != tensor.shape:
                raise self._corrupt(
                    name, f"has a shard of shape {list(tensor.shape)}, but its metadata records {list(sizes)}"
                )
            if (offsets, sizes) not in known:
                raise self._corrupt(name, f"has a shard at {list(offsets)} that its list of shards lacks")
            tiles.append(ChunkTile(offsets, tensor))
        return Shards(shape, frozenset(known), tuple(tiles))

    def _box(self, name: str, attrs: Mapping[str, Any], shape: Shape) -> tuple[Shape, Shape]:
        offsets = self._counts(name, attrs.get("shard_offsets"), "a shard at")
        sizes = self._counts(name, attrs.get("shard_sizes"), "a shard of")
        if not len(offsets) == len(sizes) == len(shape):
            shard = f"a shard with the offsets {list(offsets)} and sizes {list(sizes)}"
            raise self._corrupt(name, f"has {shard}, but the tensor has {len(shape)} dimensions")
        return offsets, sizes


def _attributes_of(node: Composite) -> dict[str, Any]:
    """Return the attributes of a tensor of a wrapper subclass: a dict, or a dict and a dict of slots."""
    state = node.parts.get("attributes")
    parts = state if type(state) is tuple else (state,)
    return {name: value for part in parts if type(part) is dict for name, value in part.items()}


def _flat(value: Any) -> tuple[Any, ...]:
    """Return a number, a tuple of numbers, or a tuple of such tuples as one tuple."""
    if type(value) is not tuple or len(value) > MAX_DIMS:
        return (value,)
    return tuple(itertools.chain.from_iterable(item if type(item) is tuple else (item,) for item in value))


def parts_of(piece: Piece) -> tuple[LazyTensor, ...]:
    """Return the stored tensors of a piece."""
    return tuple(tile.tensor for tile in piece.tiles) if isinstance(piece, Shards) else (piece.tensor,)


def shape_of(piece: Piece) -> Shape:
    """Return the shape of the whole tensor of a piece."""
    if isinstance(piece, Whole):
        return piece.tensor.shape
    return piece.layout.shape if isinstance(piece, RankPart) else piece.shape
