"""Everything that opens a file or a connection.

In: paths and URLs. Out: readers of ranges, writers, listings. `files` reads, and buffers descriptions; `archive` reads
zip archives; `writing` writes; `coalesce` groups near ranges; `packed` reads files, and names the feature that unpacks
them. `stores` names the features that reach URLs. Nothing here knows a format."""

from __future__ import annotations

# The first bytes of a zip archive.
LOCAL_SIGNATURE = b"PK\x03\x04"
