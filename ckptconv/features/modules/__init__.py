"""Whole modules, as `torch.save(model)` pickles them, read as their state dicts.

In: the tree of a file, with objects of unknown classes. Out: the tree with the state dict of each module in its place.
`whole` knows how Python pickles modules, and `packed` the objects of torch's C++ code in quantized ones.
"""

from __future__ import annotations

PAGES = ()
