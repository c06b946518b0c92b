"""DDUF, a pipeline of diffusers in one file, opened as a checkpoint.

In: a zip archive of stored members. Out: a `Source` with the tensors of all models in it, each named after its folder.
"""

from __future__ import annotations

PAGES = ()
