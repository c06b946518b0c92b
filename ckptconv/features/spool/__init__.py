"""A temporary file without a name, for what can be read only once: input from a pipe, compressed members, requests.

In: bytes, from several threads. Out: the same bytes, at any offset, until the process ends, however it ends. The
features that keep such data build on this one; `Readers` in `storage/files.py` has a spool for each process.
"""

from __future__ import annotations

PAGES = ()
