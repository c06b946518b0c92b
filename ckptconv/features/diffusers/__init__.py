"""Pipelines of diffusers and of sentence-transformers: directories of several models, converted together.

In: the directory, which has model_index.json or modules.json. Out: the folders of its models, and sources of the files
that belong to them.
"""

from __future__ import annotations

PAGES = ()
NEEDS = ("companions", "configs")
