"""Pickles that follow each other in a file, where only parsing one says where the next one begins.

In: the reader of a file, and the bytes in which they lie. Out: each pickle as inert data. The features that read the
containers of torch before 1.6, and `scan`, build on this one.
"""

from __future__ import annotations

PAGES = ()
