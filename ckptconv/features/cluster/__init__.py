"""`--dask`: a conversion's files are written by the workers of a dask.distributed cluster.

In: the address of its scheduler. Out: an executor, as `convert(executor=…)` takes it.
"""

from __future__ import annotations

from ckptconv.options import RUNNING
from ckptconv.options.kinds import TEXT
from ckptconv.options.option import Option, options_in

PAGES = ("dask.md",)


class _Spreading:
    """The option of conversions."""

    dask = Option(
        TEXT,
        "Spread the work over a dask.distributed cluster. URL is the address of its scheduler, such as "
        "tcp://10.0.0.1:8786.",
        metavar="ADDRESS",
        group=RUNNING,
    )


OPTIONS = options_in(_Spreading)
