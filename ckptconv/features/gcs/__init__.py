"""Google Cloud Storage as a store: gs:// and gcs://.

In: URLs of objects. Out: what `storage.stores` has of a store. Objects are read as gcsfs reads them, and written as
uploads that wait for their commit.
"""

from __future__ import annotations
