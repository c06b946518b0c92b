"""Google Cloud Storage as a store: gs:// and gcs://.

In: URLs of objects. Out: `STORE`, for the feature `remote`. Objects are read as gcsfs reads them, and
written as uploads that wait for their commit.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("remote",)
