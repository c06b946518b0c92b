"""The options of `serve`."""

from __future__ import annotations

from ckptconv.options import RUNNING
from ckptconv.options.kinds import TEXT, counted
from ckptconv.options.option import Option, options_in


class _Serving:
    """Options that only `serve` has."""

    host = Option(
        TEXT, "Listen at this address; 0.0.0.0: at all that this machine has.", default="127.0.0.1", group=RUNNING
    )
    port = Option(
        counted(0, 65535),
        "Listen at this port.",
        metavar="N",
        fallback="any that is free",
        group=RUNNING,
        common=True,
    )


SERVING = options_in(_Serving)
