"""Models of NeMo (.nemo), opened as a checkpoint.

In: a tar archive, plain or compressed with gzip, of a configuration and weights. Out: a `Source` of the weights, which
are read inside the archive.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("compressed", "modules", "tar")
