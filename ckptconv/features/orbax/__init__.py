"""Steps of Orbax, JAX's checkpoints, opened without tensorstore.

In: the directory of a step, of an item in one, or of a run of them. Out: a `Source`. Its arrays are joined from chunks,
which `zarr` finds in a database of `ocdbt` or in directories.
"""

from __future__ import annotations

PAGES = ("orbax.md",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("compressed", "joining", "ocdbt", "zarr")
SCRIPTS = ("formats/orbax.py", "formats/tensorstore.py", "kills/orbax.py")
# The reason why it exceeds a format's budget.
EXCEEDS = "it finds steps of runs, reads trees, and names optimizer states"
