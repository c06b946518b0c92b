"""Computes how ZeRO cuts parameters into the partitions of its ranks, and joins them again. Pure arithmetic.

The same layout applies to the master weights and to every optimizer state that is partitioned like them.
Sources: DeepSpeed's runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py and utils/zero_to_fp32.py.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.formats.run_names import EXPERT
from ckptconv.tensors.lazy import Concat, LazyTensor, Narrow, Partitioned, Stored, View

Shape = tuple[int, ...]

# Give up on a list of parameters that could be divided into groups in more ways than this.
MOST_WAYS = 1000

# Prefix of the names of modules that several layers of a pipeline share.
TIED = "tied_modules."
_EXPERT = re.compile(EXPERT)


class Slice(NamedTuple):
    """A parameter's place: `offset` elements into the flat vector (ZeRO-1/2), or into each rank's partition (ZeRO-3).

    Under ZeRO-3 each rank holds `piece` elements of the parameter.
    """

    name: str
    shape: Shape
    offset: int
    piece: int = 0


def walk_flat(shapes: Mapping[str, Shape], paddings: Sequence[int] = ()) -> tuple[list[Slice], int]:
    """Place parameters consecutively in one flat vector, each followed by its alignment padding. Return its end too."""
    slices, offset = [], 0
    for index, (name, shape) in enumerate(shapes.items()):
        slices.append(Slice(name, shape, offset))
        offset += math.prod(shape) + (paddings[index] if paddings else 0)
    return slices, offset


def walk_pieces(shapes: Mapping[str, Shape], world: int) -> tuple[list[Slice], int]:
    """Cut parameters into equal pieces for `world` ranks. Return also where a rank's pieces end."""
    slices, offset = [], 0
    for name, shape in shapes.items():
        piece = -(-math.prod(shape) // world)
        slices.append(Slice(name, shape, offset, piece))
        offset += piece
    return slices, offset


def cut_flat(slices: Sequence[Slice], partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the parameters in the flat vector that is the concatenation of the ranks' 1-D `partitions`."""
    flat = partitions[0] if len(partitions) == 1 else Concat(tuple(partitions))
    for name, shape, offset, _ in slices:
        yield name, _shaped(Narrow(flat, 0, offset, math.prod(shape)), shape)


def whole_in(slices: Sequence[Slice], start: int, size: int) -> list[Slice]:
    """Return the parameters that overlap a partition: `size` elements of the flat vector from `start`.

    Their `offset` is their place in a vector of these parameters alone, each of them whole.
    """
    overlapping, at = [], 0
    for piece in slices:
        numel = math.prod(piece.shape)
        if numel and piece.offset < start + size and piece.offset + numel > start:
            overlapping.append(piece._replace(offset=at))
            at += numel
    return overlapping


def cut_pieces(slices: Sequence[Slice], partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the parameters whose pieces are in the ranks' 1-D `partitions`."""
    dtype = partitions[0].dtype
    stored = [part for part in partitions if isinstance(part, Stored) and part.contiguous]
    simple = len(stored) == len(partitions)
    # All parameters of a group share these two tuples.
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
    """Divide a list of parameters with `sizes` elements into groups: return the indices that belong to each.

    Releases before 0.5.4 wrote one list for all groups. `held` has for each group its number of elements, and a unit:
    padding may extend the group to the next multiple of the unit. Return None if there is no way to divide the list,
    more than one, or too many to try.
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    # From the number of parameters assigned so far to the ends of the groups so far; None if several divisions fit.
    ways: dict[int, list[int] | None] = {0: []}
    for size, unit in held:
        after: dict[int, list[int] | None] = {}
        for start, cuts in ways.items():
            for stop in range(bisect.bisect_right(ends, ends[start] + size) - 1, start - 1, -1):
                if size > -(-(ends[stop] - ends[start]) // unit) * unit:
                    break
                if stop == len(sizes) or sizes[stop]:  # empty parameters belong to the group before them
                    after[stop] = None if stop in after or cuts is None else [*cuts, stop]
        ways = after
        if len(ways) > MOST_WAYS:
            return None
    cuts = ways.get(len(sizes))
    return None if cuts is None else [range(start, stop) for start, stop in zip([0, *cuts], cuts, strict=False)]


# ---------------------------------------------------------------------------------------------------------- experts


class Expert(NamedTuple):
    """The parts of the name of an expert's parameter: `layer`, the expert's number, `rest`."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}{self.number}{self.rest}"


def expert_of(name: str) -> Expert | None:
    """Return the expert to which the parameter `name` belongs; None if it belongs to none."""
    match = _EXPERT.fullmatch(name)
    return Expert(match[1], int(match[2]), match[3]) if match else None


def expert_numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the experts that occur in `names`, by layer."""
    numbers: dict[str, set[int]] = {}
    for expert in filter(None, map(expert_of, names)):
        numbers.setdefault(expert.layer, set()).add(expert.number)
    return numbers


def global_names(names: Iterable[str], ep_rank: int, local: Mapping[str, int]) -> dict[str, str]:
    """Map names with the local expert numbers of `ep_rank` to names with global numbers.

    `local` is the number of experts of each layer that one expert-parallel rank holds.
    """
    experts = {name: expert_of(name) for name in names}
    return {
        name: str(expert._replace(number=ep_rank * local[expert.layer] + expert.number)) if expert else name
        for name, expert in experts.items()
    }


def ranks_of_group(world: int, partitions: int, data_first: bool = False) -> list[list[int]]:
    """Return, for each copy of a group, the data-parallel ranks that hold it.

    There is one copy, [[0, 1, …]], but for experts one per expert-parallel rank. Expert-parallel ranks are neighbours;
    with `data_first`, the ranks that share experts are.
    """
    copies = world // partitions
    if data_first:
        return [list(range(copy * partitions, (copy + 1) * partitions)) for copy in range(copies)]
    return [list(range(copy, world, copies)) for copy in range(copies)]


def join_experts(parts: Sequence[LazyTensor], experts: Sequence[Sequence[int]]) -> LazyTensor:
    """Join fused experts in the order of their numbers. `parts[r]` holds `experts[r]` along dimension 0."""
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
