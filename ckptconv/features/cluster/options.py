"""The option of conversions about a cluster."""

from __future__ import annotations

from ckptconv.options import RUNNING
from ckptconv.options.kinds import TEXT
from ckptconv.options.option import Given, option


class ClusterOptions(Given):
    """The cluster whose workers write the files."""

    dask: str = option(
        TEXT,
        "Distribute the work over a dask.distributed cluster. ADDRESS is the address of its scheduler, such as "
        "tcp://10.0.0.1:8786.",
        metavar="ADDRESS",
        group=RUNNING,
    )


GIVEN = ClusterOptions
