"""S3, and what speaks as it does, as a store: s3:// and s3a://.

In: URLs of objects. Out: what `storage.stores` has of a store. Objects are read by ranges, each of the version that was
opened, and written as multipart uploads.
"""

from __future__ import annotations
