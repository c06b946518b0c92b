"""Pairs of tensors of one shape, whose elements are compared.

In: two lazy tensors, or the bytes of some of their elements. Out: the `runs` of elements that are compared in one step,
which `elements` differ, and one of them as text. The features that compare tensors build on this one.
"""

from __future__ import annotations

PAGES = ()
