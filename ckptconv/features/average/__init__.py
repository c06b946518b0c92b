"""Averages of checkpoints, and differences of them.

In: paths of checkpoints of any formats, and the weight of each. Out: a source with the other terms, as `COMPUTED` has
it. Its tensors are weighted sums of the terms' tensors.
"""

from __future__ import annotations

PAGES = ("average.md",)
# The feature that it builds on: without it, it is gone too.
NEEDS = ("sums",)
