"""HTTP, for scripts/smoke.py: a file on a server is read; without the package, the message says what to install."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def run(smoke: Any) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        smoke.run("convert", "http://127.0.0.1:9/model.pt", "x", code=2)
        return
    with serving(smoke.place) as url:
        smoke.run("pt2safetensors", f"{url}/model.pt", "http.safetensors", *smoke.readable)
    smoke.same("model.safetensors", "http.safetensors")


@contextlib.contextmanager
def serving(place: Path) -> Iterator[str]:
    """The address of a server of HTTP, without ranges, for the files in a directory."""
    handler = functools.partial(Silent, directory=str(place))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
