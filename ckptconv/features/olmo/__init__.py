"""OLMo's safetensors, in which the names of tensors are pickles of paths: read without unpickling them.

In: the tensors of files by name, and a reader of them. Out: the tree from which they were made.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining",)
