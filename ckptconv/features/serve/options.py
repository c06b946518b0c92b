"""The options of `serve`."""

from __future__ import annotations

from ckptconv.options import RUNNING
from ckptconv.options.kinds import TEXT, counted
from ckptconv.options.option import Option, options_in


class _Serving:
    """Options that only `serve` has."""

    host = Option(
        TEXT,
        "The address to listen on; 0.0.0.0 means all addresses of this machine.",
        default="127.0.0.1",
        group=RUNNING,
    )
    port = Option(
        counted(0, 65535),
        "The port to listen on.",
        metavar="N",
        fallback="any free port",
        group=RUNNING,
        common=True,
    )


SERVING = options_in(_Serving)
