"""Outputs that are like a reference: with its names, files, dtypes and small files.

In: an opened source, and the path of another checkpoint, which is opened as its reference. Out: the tensors that are
selected, as the output has them; or which are missing, too many, or of another shape.
"""

from __future__ import annotations

PAGES = ("like.md",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("companions", "model_facts")
