"""Steps of nanotron, opened as a checkpoint.

In: the directory of a step. Out: a `Source` whose tensors are joined from the parts of the tensor-parallel ranks.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining",)
