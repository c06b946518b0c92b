"""Sharded sets of torch.save: one state dict in several files, with or without an index.

In: the location of an index, or of a directory with a set. Out: a `Source` of one state dict.
"""

from __future__ import annotations

PAGES = ()
