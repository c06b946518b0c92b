"""Flatten nested state to named tensors and a structure record, and reverse it exactly.

In: a tree of plain values, nodes and tensors, or live objects. Out: `dict[str, tensor]` and a record in JSON
(docs/structure.md). The reverse takes these and returns the tree. `maps` gives tensors the names and layouts of another
program.
"""
