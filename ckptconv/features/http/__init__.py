"""Files on servers of HTTP, as a store: http:// and https://.

In: URLs of files. Out: the interface of a store in `storage.stores`. A file that a server only returns whole is read
once, into a temporary file; nothing is written.
"""

from __future__ import annotations
