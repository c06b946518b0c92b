"""Compare two checkpoints of any formats: which tensors differ, in how many elements, and by how much.

In: two `Source`s and options. Out: a `Difference`, and its text and page. `difference` matches names, dtypes and
shapes; `reading` reads both sides of each pair, block by block, with the engine's threads; `changes` counts and
measures what differs in a block. No more than a few blocks are in memory at a time. What changes one into the other is
written by features that `WRITERS` in `comparing` names.
"""

from __future__ import annotations

PAGES = ("diff.md",)
