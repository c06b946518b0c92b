"""Files on servers of HTTP, as a store: http:// and https://.

In: URLs of files. Out: `STORE`, for the feature `remote`. A file that a server only returns whole is read
once, into a temporary file; nothing is written.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("compressed", "remote", "spool")
