"""Nested state to flat names and back: the key mapper, and the structure record that makes it reversible.

In: a tree of plain values, nodes and tensors, or live objects. Out: `dict[str, tensor]` and a record in JSON
(docs/structure.md); and the way back."""
