"""Files on servers of HTTP, as a store: http:// and https://.

In: URLs of files. Out: what `storage.stores` has of a store. What a server gives only whole is read once, into a
temporary file; nothing is written.
"""

from __future__ import annotations
