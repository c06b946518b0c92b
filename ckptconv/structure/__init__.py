"""Flatten nested state to named tensors and a structure record, and reverse it exactly.

In: a tree of plain values, nodes and tensors. Out: `dict[str, tensor]` and a record in JSON (docs/structure.md). The
features `unflattening`, which takes these and returns the tree, and `live_objects`, for objects of torch and numpy, go
further.
"""
