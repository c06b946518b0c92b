"""Deltas: the changes from one version of a model's weights to the next, in the layout that slime and sglang use.

In: two checkpoints that `diff` compares, with an encoder of their changes; or a base and directories of deltas, which
`patch` applies. Out: the files of a delta, or a source with deltas, as `COMPUTED` has it.
"""

from __future__ import annotations

PAGES = ("deltas.md",)
# Features to which this one adds: a copy without them is also without this one.
NEEDS = ("compressed", "diff", "spool")
