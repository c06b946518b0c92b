"""A conversion in parts: which files are whose, with no coordination between those who make them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign(sizes: Sequence[int], count: int, shift: int = 0) -> list[int]:
    """For each file its part, of `count`: the largest first, each to the part that has the least so far.

    `shift` has another part begin: outputs of one file each are not all made by the first.
    """
    # However many parts there are, no more of them get a file than there are files.
    filled = [(0, part) for part in range(min(count, len(sizes)))]
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size, part = filled[0]
        found[index] = (part + shift) % count
        heapq.heapreplace(filled, (size + sizes[index], part))
    return found
