"""Checkpoints in programs, as arrays of torch or numpy: `open` and `load_state_dict`.

In: a path. Out: a mapping of lazy tensors, or a state dict. Arrays are maps of the files where the bytes lie as they
are needed, and copies otherwise. One mechanism, `memory`, makes all arrays, for the `frameworks` there are.
"""

from __future__ import annotations

PAGES = ()
SCRIPTS = ("test_trainers.py",)
FILES = ("examples/load_transformers.py", "examples/load_zero.py")
# The features that it builds on: a loaded state has live tensors and values.
NEEDS = ("live_objects", "unflattening")
