"""Compares two checkpoints of any formats: which tensors differ, in how many elements, and by how much.

In: two `Source`s and options. Out: a `Difference`, and its text and page. `difference` matches names, dtypes and
shapes; `reading` reads both sides of each pair, block by block, with the engine's threads; `changes` counts and
measures the differences in a block. No more than a few blocks are in memory at a time. Features that `WRITERS` in
`comparing` names write the changes from one checkpoint to the other.
"""

from __future__ import annotations

PAGES = ("diff.md",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("pairs", "reporting")
