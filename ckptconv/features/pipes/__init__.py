"""Input from a pipe: standard input, or a pipe that the shell names, such as <(zstdcat x.pt.zst).

In: "-", or a path in /dev/fd. Out: the name under which a temporary file with all of it can be read, at any offset.
`formats.detect` asks for it before it opens a path.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on.
NEEDS = ("spool",)
