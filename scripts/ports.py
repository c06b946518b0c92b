"""Ports on which nobody listens, for what the scripts start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
