"""S3, and stores with its interface, as a store: s3:// and s3a://.

In: URLs of objects. Out: the interface of a store in `storage.stores`. Objects are read by ranges, each of the version
that was opened, and written as multipart uploads.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("http",)
