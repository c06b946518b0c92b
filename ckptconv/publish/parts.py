"""Assigns files to the parts of a conversion, without coordination between the processes that write them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign(sizes: Sequence[int], count: int, shift: int = 0) -> list[int]:
    """Return the part, of `count`, of each file: largest first, each goes to the part with the fewest bytes so far.

    `shift` rotates the parts, so that outputs of one file each are not all made by the first part.
    """
    # No more parts than files get a file.
    filled = [(0, part) for part in range(min(count, len(sizes)))]
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size, part = filled[0]
        found[index] = (part + shift) % count
        heapq.heapreplace(filled, (size + sizes[index], part))
    return found
