"""Removal of a directory's entries, or their reduction, safe against kills and other users.

In: names in a directory, and the files that were seen below them. `entries` says what an entry is, and what tells it
from any other; `area` is the hidden directory in which entries wait, with its journal; `leaving` does the steps in
order, and finishes what was interrupted. Everything goes by open directories. What `thin` does is built on this.
"""

from __future__ import annotations

PAGES = ()
