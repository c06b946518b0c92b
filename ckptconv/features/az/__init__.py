"""Azure's blob storage as a store: az://, abfs:// and abfss://.

In: URLs of blobs. Out: the interface of a store in `storage.stores`. Blobs are read by ranges, each of the version that
was opened, and written as blocks.
"""

from __future__ import annotations
