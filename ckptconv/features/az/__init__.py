"""Azure's blob storage as a store: az://, abfs:// and abfss://.

In: URLs of blobs. Out: `STORE`, for the feature `remote`. Blobs are read by ranges, each of the version that
was opened, and written as blocks.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("remote",)
