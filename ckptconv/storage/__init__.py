"""All that opens a file or a connection.

In: paths and URLs. Out: readers of ranges, writers, listings. `files` reads, and buffers descriptions; `archive` reads
zip archives; `writing` writes; `remote` reaches stores through fsspec; `coalesce` groups what lies near; `prefetch`
fetches what tasks will read from remote files, in few requests; `spool` keeps what can be read only once; `uploads`
writes to stores. Nothing here knows a format."""

from __future__ import annotations

# How a zip archive begins.
LOCAL_SIGNATURE = b"PK\x03\x04"
