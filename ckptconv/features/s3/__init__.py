"""S3, and stores with its interface, as a store: s3:// and s3a://.

In: URLs of objects. Out: `STORE`, for the feature `remote`. Objects are read by ranges, each of the version
that was opened, and written as multipart uploads.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("remote", "http")
