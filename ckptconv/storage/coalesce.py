"""Runs of bytes that lie near each other, read as one. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ckptconv.tensors.moves import Runs

# To read so many bytes along costs no more than to begin anew; and so many are read at once.
NEAR, BLOCK = 4096, 1 << 18


def blocks(runs: Runs) -> Iterator[Runs]:
    """`runs` in their order, in parts of which each is best read from its first byte to its last."""
    offset, length, grid = runs
    inner, span, rows = len(grid), length, 0
    while inner:
        count, distance = grid[inner - 1]
        if distance - span > NEAR:
            break
        if span + (count - 1) * distance > BLOCK:
            rows = max((BLOCK - span) // max(distance, 1) + 1, 1)
            break
        span += (count - 1) * distance
        inner -= 1
    together = grid[inner:]
    if not rows:
        for at in Runs(offset, length, grid[:inner]).offsets():
            yield Runs(at, length, together)
        return
    count, distance = grid[inner - 1]
    for at, first in itertools.product(Runs(offset, length, grid[: inner - 1]).offsets(), range(0, count, rows)):
        yield Runs(at + first * distance, length, ((min(rows, count - first), distance), *together))


def are_near(runs: Runs) -> bool:
    """Whether several of `runs` are best read at once."""
    return bool(runs.grid) and runs.grid[-1][1] - runs.length <= NEAR
