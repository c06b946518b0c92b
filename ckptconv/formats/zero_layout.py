"""How ZeRO cuts parameters into the partitions of its ranks, and how they are joined again. Pure arithmetic.

The same walk applies to the master weights and to every optimizer state that is partitioned like them.
Sources: DeepSpeed's runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py and utils/zero_to_fp32.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.tensors import Concat, LazyTensor, Narrow, Partitioned, Stored, View

Shape = tuple[int, ...]

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


def expert_names(names: Sequence[str], ep_rank: int) -> dict[str, str]:
    """Names with local expert numbers → names with global ones, for the experts of `ep_rank`.

    Every expert-parallel rank holds as many experts of a layer as there are local numbers.
    """
    matches = {name: _EXPERT.fullmatch(name) for name in names}
    local: dict[str, set[int]] = {}
    for match in matches.values():
        if match:
            local.setdefault(match[1], set()).add(int(match[2]))
    return {
        name: f"{match[1]}{ep_rank * len(local[match[1]]) + int(match[2])}{match[3]}" if match else name
        for name, match in matches.items()
    }


def expert_numbers(names: Sequence[str]) -> dict[str, set[int]]:
    """The expert numbers that occur, by the prefix of their names: one prefix for every layer of experts."""
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        found.setdefault(match[1], set()).add(int(match[2]))
    return found


def ranks_of_group(world: int, partitions: int) -> list[list[int]]:
    """The data-parallel ranks that hold one copy of a group each: [[0, 1, …]], or for experts one list for every
    expert-parallel rank."""
    copies = world // partitions
    return [list(itertools.islice(range(world), copy, None, copies)) for copy in range(copies)]
