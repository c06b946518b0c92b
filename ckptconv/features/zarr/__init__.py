"""Arrays of zarr 2 and 3, in any store of values by key.

In: the values of each array, with its description among them. Out: tensors, joined from chunks. `layouts` reads
descriptions, `arrays` joins chunks, and `unpacking` unpacks those that are packed in zarr's own ways.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("compressed", "joining")
