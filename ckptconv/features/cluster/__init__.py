"""`--dask`: a conversion's files are written by the workers of a dask.distributed cluster.

In: the address of its scheduler. Out: an executor, as `convert(executor=…)` takes it.
"""

from __future__ import annotations

PAGES = ("dask.md",)
NEEDS = ("executors",)
