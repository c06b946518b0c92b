"""Averages of checkpoints, and differences of them.

In: paths of checkpoints of any formats, and how much each counts. Out: a source with the other terms, as `COMPUTED` has
it, whose tensors are weighted sums of theirs.
"""

from __future__ import annotations

PAGES = ("average.md",)
