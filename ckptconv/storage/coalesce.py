"""Groups ranges that are near each other in a file, to be read at once. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ckptconv.tensors.moves import Runs

# A gap of up to `NEAR` bytes costs no more to read than another read; up to `BLOCK` bytes are read at once.
NEAR, BLOCK = 4096, 1 << 18


def blocks(runs: Runs) -> Iterator[Runs]:
    """Yield `runs` in their order, in groups that are each best read from the first byte to the last."""
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
    """Return whether it is best to read several of `runs` at once."""
    return bool(runs.grid) and runs.grid[-1][1] - runs.length <= NEAR
