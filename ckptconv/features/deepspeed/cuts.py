"""Cutting the parameters of a group out of the partitions of its ranks.

What the files say of a group must agree: the shapes of its parameters, their padding, and the sizes of its partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptconv.errors import CorruptError
from ckptconv.features.deepspeed import partitions as zero_layout
from ckptconv.features.deepspeed.partitions import Shape, Slice
from ckptconv.features.deepspeed.records import ModelFile, OptimFile
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import brief, count_of

# Names of the three weights of an expert where a layer of experts is fused.
FUSED = ("w1", "w2", "w3")


@dataclass(frozen=True)
class GroupCut:
    """Offsets of one copy of a group's parameters in the partitions of `ranks`.

    `names` are the names of the result, by those in `slices`. `sizes` are the numbers of elements that a padded
    partition may have. The first of them is the distance between the starts of two ranks' partitions.
    """

    slices: list[Slice]
    ranks: list[int]
    names: Mapping[str, str]
    pieces: bool
    sizes: tuple[int, ...] = ()

    def whole(self, index: int) -> list[Slice]:
        """Return the parameters that overlap the partition of `ranks[index]`, at offsets in a vector of these alone."""
        return zero_layout.whole_in(self.slices, index * self.sizes[0], self.sizes[0])

    def apply(self, partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the parameters in `partitions`, one for every data-parallel rank."""
        cut = zero_layout.cut_pieces if self.pieces else zero_layout.cut_flat
        for name, tensor in cut(self.slices, [partitions[rank] for rank in self.ranks]):
            yield self.names[name], tensor


@dataclass(frozen=True)
class Group:
    """Offsets of a group's parameters in the partitions: one set, or for experts one per expert-parallel rank.

    `fused` gives, for each parameter that holds several experts, the experts on each of those ranks.
    """

    cuts: list[GroupCut]
    fused: Mapping[str, list[list[int]]]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for cut in self.cuts for name in cut.names.values()))

    @property
    def pieces(self) -> bool:
        return self.cuts[0].pieces

    def apply(self, partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the parameters in `partitions`, one for every data-parallel rank."""
        return self.join(cut.apply(partitions) for cut in self.cuts)

    def join(self, copies: Iterable[Iterable[tuple[str, LazyTensor]]]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the parameters of all cuts, with each fused parameter joined into one."""
        joined: dict[str, list[LazyTensor]] = {}
        for copy in copies:
            for name, tensor in copy:
                if name in self.fused:
                    joined.setdefault(name, []).append(tensor)
                else:
                    yield name, tensor
        for name, parts in joined.items():
            yield name, zero_layout.join_experts(parts, self.fused[name])


def cut_pieces(group: int, shapes: Mapping[str, Shape], optims: Sequence[OptimFile]) -> Group:
    """Cut a sub-group of ZeRO-3, where every rank holds a piece of every parameter."""
    slices, end = zero_layout.walk_pieces(shapes, len(optims))
    for optim in optims:
        if optim.masters[group].numel != end:
            raise CorruptError(
                f"{optim.file.path}: flat group {group} has {optim.masters[group].numel} elements, but the shapes of "
                f"its {count_of(len(shapes), 'parameter')} on {count_of(len(optims), 'rank')} require {brief(end)}."
            )
    return Group([GroupCut(slices, list(range(len(optims))), {name: name for name in shapes}, pieces=True)], {})


@dataclass(frozen=True)
class Experts:
    """Facts about experts.

    `local`: how many experts of a layer each expert-parallel rank holds. `fused`: by parameter and rank, the experts in
    it. `data_first`: whether neighbouring ranks share experts.
    """

    local: Mapping[str, int]
    fused: Mapping[str, list[list[int]]]
    data_first: bool


def experts_of(model: ModelFile, optims: Sequence[OptimFile], shapes: Sequence[Mapping[str, Shape]]) -> Experts:
    world = len(optims)
    # Several groups may hold a layer's experts, and some of them may be frozen.
    local = [name for group, named in enumerate(shapes) if optims[0].count(group) not in (0, world) for name in named]
    numbers = zero_layout.expert_numbers([*local, *(model.frozen or {})])
    return Experts(
        {layer: max(layer_numbers) + 1 for layer, layer_numbers in numbers.items()},
        {f"{layer.prefix}.{name}": layer.experts for layer in model.fused for name in FUSED},
        optims[0].data_first,
    )
