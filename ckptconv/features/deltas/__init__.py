"""Deltas: what changes one version of a model's weights into the next, in the layout that slime and sglang use.

In: two checkpoints that `diff` compares, with an encoder of what changes; or a base and directories of deltas, which
`patch` applies. Out: the files of a delta, or a source with deltas, as `COMPUTED` has it.
"""

from __future__ import annotations

PAGES = ("deltas.md",)
# Features that this one adds to: without them, it is gone too.
NEEDS = ("diff",)
