"""Files, archives and directories of other programs: each is called what it is, with what makes a checkpoint of it.

In: first bytes of a file, names of members, names in a directory, of what no format reads. Out: the error that says
which program wrote it. Without this feature, such a path is refused as no known checkpoint.
"""

from __future__ import annotations

PAGES = ()
