"""Cut pairs of tensors into runs that are compared in one step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptconv.features.pairs.elements import number_of, place_of
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.slices import Span, sliced


class ExpectedPair(NamedTuple):
    """A tensor as expected and as found, the path of its file, and its name."""

    want: LazyTensor
    got: LazyTensor
    path: str
    name: str


class Run(NamedTuple):
    """A part of both tensors of a pair: elements `start` to `stop` in C order, or a box.

    A box is given by the index of its first element and its extent along each dimension; its elements are counted from
    0 to `stop`.
    """

    start: int
    stop: int
    box: tuple[list[int], list[int]] | None = None

    def of(self, tensor: LazyTensor) -> LazyTensor:
        """Return the tensor whose elements these are."""
        if self.box is None:
            return tensor
        return sliced(tensor, [Span(start, 1, count) for start, count in zip(*self.box, strict=True)])

    def number(self, index: int, shape: Sequence[int]) -> int:
        """Return the number, in C order in a tensor of `shape`, of element `index` of this run."""
        if self.box is None:
            return self.start + index
        starts, counts = self.box
        inside = place_of(index, counts)
        return number_of([start + at for start, at in zip(starts, inside, strict=True)], shape)

    def cut(self, count: int) -> Iterator[Run]:
        """Yield runs of at most `count` elements that this one in C order consists of."""
        for start in range(self.start, self.stop, count):
            yield Run(start, min(start + count, self.stop))


def is_scattered(want: LazyTensor, got: LazyTensor) -> bool:
    """Return whether one of two tensors is stored in an order that makes reading in C order slow."""
    return want.scattered or got.scattered


def runs(want: LazyTensor, got: LazyTensor, size: int) -> Iterator[Run]:
    """Yield the runs that cover two tensors of one shape, of at most `size` bytes of both."""
    if is_scattered(want, got):
        larger = max(want, got, key=lambda tensor: tensor.dtype.itemsize)
        for starts, counts in _boxes(larger, size // 2) if larger.numel else ():
            yield Run(0, math.prod(counts), (starts, counts))
    else:
        yield from in_order(want, got, size)


def in_order(want: LazyTensor, got: LazyTensor, size: int) -> Iterator[Run]:
    """Yield the runs in C order that cover two tensors of one shape, of at most `size` bytes of both."""
    return Run(0, want.numel).cut(max(size // (want.dtype.itemsize + got.dtype.itemsize), 1))


def _boxes(tensor: LazyTensor, size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield boxes of at most `size` bytes that cover `tensor`, with sides as equal as its shape allows.

    Such a box consists of runs that are not too short, in any order in which a file may store the elements.
    """
    limit = max(size // tensor.dtype.itemsize, 1)
    sides = [1] * len(tensor.shape)
    while True:
        small = [d for d, side in enumerate(sides) if side < tensor.shape[d]]
        grown = min(small, key=lambda dim: sides[dim], default=None)
        if grown is None or math.prod(sides) * 2 > limit:
            break
        sides[grown] = min(sides[grown] * 2, tensor.shape[grown])
    for starts in itertools.product(
        *(range(0, extent, side) for extent, side in zip(tensor.shape, sides, strict=True))
    ):
        counts = [min(side, extent - at) for side, extent, at in zip(sides, tensor.shape, starts, strict=True)]
        yield list(starts), counts
