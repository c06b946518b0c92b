"""The way back from a structure record: `ckptconv.unflatten`, and the trees of safetensors files that have one.

In: tensors by name, and the record of `ckptconv.flatten`, which may be damaged, or made to take forever. Out: the tree.
`decoder` reads the record. Live objects are made by the feature `live_objects`, if it is there.
"""

from __future__ import annotations
