"""State dicts of a running program as safetensors: the files that a conversion of them writes.

In: a state of torch's tensors, numpy's arrays and plain values, and a path. Out: a `Report`, and files that
`load_state_dict` reads back as the state. Tensors are written from the memory that they are in.
"""

from __future__ import annotations

# The features that it builds on.
NEEDS = ("live_objects", "unflattening")
