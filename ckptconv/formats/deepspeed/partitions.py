"""How ZeRO cuts parameters into the partitions of its ranks, and how they are joined again. Pure arithmetic.

The same walk applies to the master weights and to every optimizer state that is partitioned like them.
Sources: DeepSpeed's runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py and utils/zero_to_fp32.py.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.tensors.lazy import Concat, LazyTensor, Narrow, Partitioned, Stored, View

Shape = tuple[int, ...]

# Lists that can be divided in more ways than this are not.
MOST_WAYS = 1000

# What the names of modules begin with that several layers of a pipeline share.
TIED = "tied_modules."
_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


class Slice(NamedTuple):
    """A parameter's place: `offset` elements into the flat vector (ZeRO-1/2) or into every rank's partition (ZeRO-3,
    where `piece` elements of it lie on each rank)."""

    name: str
    shape: Shape
    offset: int
    piece: int = 0


def walk_flat(shapes: Mapping[str, Shape], paddings: Sequence[int] = ()) -> tuple[list[Slice], int]:
    """Parameters one after the other in one flat vector, each followed by its alignment padding; and where they end."""
    slices, offset = [], 0
    for index, (name, shape) in enumerate(shapes.items()):
        slices.append(Slice(name, shape, offset))
        offset += math.prod(shape) + (paddings[index] if paddings else 0)
    return slices, offset


def walk_pieces(shapes: Mapping[str, Shape], world: int) -> tuple[list[Slice], int]:
    """Parameters cut into equal pieces for `world` ranks; and where a rank's pieces end."""
    slices, offset = [], 0
    for name, shape in shapes.items():
        piece = -(-math.prod(shape) // world)
        slices.append(Slice(name, shape, offset, piece))
        offset += piece
    return slices, offset


def cut_flat(slices: Sequence[Slice], partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """The parameters in the flat vector that the ranks' 1-D `partitions` make up together."""
    flat = partitions[0] if len(partitions) == 1 else Concat(tuple(partitions))
    for name, shape, offset, _ in slices:
        yield name, _shaped(Narrow(flat, 0, offset, math.prod(shape)), shape)


def whole_in(slices: Sequence[Slice], start: int, size: int) -> list[Slice]:
    """The parameters of which a partition, `size` elements of the flat vector from `start` on, has a part; `offset` is
    theirs where each lies whole, one after the other."""
    found, at = [], 0
    for piece in slices:
        numel = math.prod(piece.shape)
        if numel and piece.offset < start + size and piece.offset + numel > start:
            found.append(piece._replace(offset=at))
            at += numel
    return found


def cut_pieces(slices: Sequence[Slice], partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """The parameters whose pieces lie in the ranks' 1-D `partitions`."""
    dtype = partitions[0].dtype
    stored = [part for part in partitions if isinstance(part, Stored) and part.contiguous]
    simple = len(stored) == len(partitions)
    # All parameters of a group share these two.
    files = tuple(part.file for part in stored)
    bases = tuple(part.offset for part in stored)
    for name, shape, offset, piece in slices:
        if simple and piece:
            yield name, Partitioned(files, bases, offset * dtype.itemsize, piece, dtype, shape)
        else:
            pieces = Concat(tuple(Narrow(part, 0, offset, piece) for part in partitions))
            yield name, _shaped(Narrow(pieces, 0, 0, math.prod(shape)), shape)


def _shaped(flat: LazyTensor, shape: Shape) -> LazyTensor:
    return flat if flat.shape == shape else View(flat, flat.dtype, shape)


def split_list(sizes: Sequence[int], held: Sequence[tuple[int, int]]) -> list[range] | None:
    """Which of a list of parameters of `sizes` elements are in each group, for releases before 0.5.4, which wrote one
    list for all groups.

    `held` tells of every group its elements, of which some may be padding up to the next multiple of a second number.
    None where there is no way to do it, or more than one.
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    # By how many parameters are taken already: where the groups before ended; None if they may have in several ways.
    ways: dict[int, list[int] | None] = {0: []}
    for size, unit in held:
        after: dict[int, list[int] | None] = {}
        for start, cuts in ways.items():
            for stop in range(bisect.bisect_right(ends, ends[start] + size) - 1, start - 1, -1):
                if size > -(-(ends[stop] - ends[start]) // unit) * unit:
                    break
                if stop == len(sizes) or sizes[stop]:  # what has no elements goes with those before it
                    after[stop] = None if stop in after or cuts is None else [*cuts, stop]
        ways = after
        if len(ways) > MOST_WAYS:
            return None
    cuts = ways.get(len(sizes))
    return None if cuts is None else [range(start, stop) for start, stop in zip([0, *cuts], cuts, strict=False)]


# ---------------------------------------------------------------------------------------------------------- experts


class Expert(NamedTuple):
    """What a parameter of an expert is called: `layer`, the expert's number, `rest`."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}{self.number}{self.rest}"


def expert_of(name: str) -> Expert | None:
    """The expert that a parameter belongs to by its name; None if to none."""
    match = _EXPERT.fullmatch(name)
    return Expert(match[1], int(match[2]), match[3]) if match else None


def expert_numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of experts that occur in names, by layer."""
    found: dict[str, set[int]] = {}
    for expert in filter(None, map(expert_of, names)):
        found.setdefault(expert.layer, set()).add(expert.number)
    return found


def global_names(names: Iterable[str], ep_rank: int, local: Mapping[str, int]) -> dict[str, str]:
    """Names with local expert numbers → names with global ones, for the experts of `ep_rank`.

    `local` says how many experts of a layer every expert-parallel rank holds.
    """
    experts = {name: expert_of(name) for name in names}
    return {
        name: str(expert._replace(number=ep_rank * local[expert.layer] + expert.number)) if expert else name
        for name, expert in experts.items()
    }


def ranks_of_group(world: int, partitions: int, data_first: bool = False) -> list[list[int]]:
    """The data-parallel ranks that hold one copy of a group each: [[0, 1, …]], or for experts one list for every
    expert-parallel rank. Those are neighbours, unless with `data_first` the ranks that share experts are."""
    copies = world // partitions
    if data_first:
        return [list(range(copy * partitions, (copy + 1) * partitions)) for copy in range(copies)]
    return [list(range(copy, world, copies)) for copy in range(copies)]


def join_experts(parts: Sequence[LazyTensor], experts: Sequence[Sequence[int]]) -> LazyTensor:
    """Fused experts in the order of their numbers: part r holds `experts[r]`, one after the other along dimension 0."""
    places = {number: (rank, at) for rank, held in enumerate(experts) for at, number in enumerate(held)}
    pieces: list[LazyTensor] = []
    for number in range(len(places)):
        rank, at = places[number]
        last = pieces[-1] if pieces else None
        if isinstance(last, Narrow) and last.tensor is parts[rank] and last.start + last.length == at:
            pieces[-1] = Narrow(parts[rank], 0, last.start, last.length + 1)
        else:
            pieces.append(Narrow(parts[rank], 0, at, 1))
    return Concat(tuple(pieces))
