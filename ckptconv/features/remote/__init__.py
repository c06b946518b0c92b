"""URLs: listing, reading and writing files on stores and servers, through fsspec.

In: URLs of any scheme that fsspec opens. Out: entries, readers of ranges, prefetched ranges, and the staging of outputs
there, which `storage.stores` asks for in `reaching`. Features of single stores build on it: `stores` says what may be
special about one.
"""

from __future__ import annotations

# Its pages in docs/.
PAGES = ("remote.md", "internals/remote.md")
# The features that it builds on.
NEEDS = ("spool",)
