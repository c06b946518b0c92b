"""Data that is stored compressed: deflated members of archives, and values in frames of zstandard or with checksums.

In: a `File` with `packed`, which says where its compressed bytes are, and the method. Out: its content, in a temporary
file, or as it is read. `storage.packed` asks for it when the first byte of such a file is requested. The features that
read formats with methods of their own build on it: `packing` has those of stores of arrays,
and `crc32c` the checksums of these and of stores of objects.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on.
NEEDS = ("spool",)
