"""The options of `serve`."""

from __future__ import annotations

import re
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import RUNNING
from ckptconv.options.kinds import TEXT, counted
from ckptconv.options.option import Option, options_in
from ckptconv.text import brief

_PORTS = counted(0, 65535)


def _check_apart(value: Any, called: str) -> None:
    """Raise UsageError for a host and a port in one text, as in 0.0.0.0:8000."""
    match = re.fullmatch(r"(?:\[([\da-fA-F:.]+)\]|([\w.-]*)):(\d{1,5})", value) if isinstance(value, str) else None
    if match:
        host = match[1] or match[2]
        instead = f"--host {host} --port {match[3]}" if host else f"--port {match[3]}"
        raise UsageError(f"{called} {brief(value)} contains both a host and a port.", f"Use {instead}.")


def _host(value: Any, called: str) -> str:
    _check_apart(value, called)
    return str(TEXT.parse(value, called))


def _port(value: Any, called: str) -> int:
    _check_apart(value, called)
    return int(_PORTS.parse(value, called))


class _Serving:
    """Options that only `serve` has."""

    host = Option(
        TEXT._replace(parse=_host),
        "The address to listen on; 0.0.0.0 means all addresses of this machine.",
        default="127.0.0.1",
        group=RUNNING,
    )
    port = Option(
        _PORTS._replace(parse=_port),
        "The port to listen on.",
        metavar="N",
        fallback="any free port",
        group=RUNNING,
        common=True,
    )


SERVING = options_in(_Serving)
