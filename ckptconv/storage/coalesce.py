"""What lies near each other in a file, read as one. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from ckptconv.storage.paths import is_remote
from ckptconv.tensors.moves import File, Runs

# To read so many bytes along costs no more than to begin anew; and so many are read at once.
NEAR, BLOCK = 4096, 1 << 18
# The same for parts of descriptions, here and in a remote file.
MAX_GAP_LOCAL, MAX_GAP_REMOTE, DESCRIPTIONS = 1 << 9, 1 << 18, 1 << 20


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


def max_gap(file: File) -> int:
    """Bytes between parts of descriptions in `file` that are cheaper to read than to skip."""
    return MAX_GAP_REMOTE if is_remote(file.path) else MAX_GAP_LOCAL


def coalesced(offsets: Iterable[int], length: int, file: File) -> Iterator[list[int]]:
    """Rising offsets of things of `length` bytes in `file`, in groups that are read together."""
    gap = max_gap(file)
    group: list[int] = []
    for offset in offsets:
        if group and (offset > group[-1] + length + gap or offset + length > group[0] + DESCRIPTIONS):
            yield group
            group = []
        group.append(offset)
    if group:
        yield group
