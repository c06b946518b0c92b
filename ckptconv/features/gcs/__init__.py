"""Google Cloud Storage as a store: gs:// and gcs://.

In: URLs of objects. Out: the interface of a store in `storage.stores`. Objects are read as gcsfs reads them, and
written as uploads that wait for their commit.
"""

from __future__ import annotations
