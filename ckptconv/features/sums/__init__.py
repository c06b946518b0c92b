"""Weighted sums of tensors, element by element.

In: tensors of one shape. Out: a `Joined` of the kernel `WeightedSum`. `sources` has the source that is made of several.
The features that add tensors up build on this one.
"""

from __future__ import annotations

PAGES = ()
