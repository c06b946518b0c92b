"""Products of two matrices that are added to a third, and rows with new lengths: of adapters, and of weights.

In: tensors, a base and its factors. Out: a `Tiled` of the kernels `LowRank` and `Magnitude`. The features that read
factors build on this one.
"""

from __future__ import annotations

PAGES = ()
