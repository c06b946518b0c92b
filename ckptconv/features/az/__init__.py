"""Azure's blob storage as a store: az://, abfs:// and abfss://.

In: URLs of blobs. Out: what `storage.stores` has of a store. Blobs are read by ranges, each of the version that was
opened, and written as blocks.
"""

from __future__ import annotations
