"""Servers for the tests, in threads of this process or in processes of their own, and links to them that break."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from ckptconv import convert

KIB, MIB = 1 << 10, 1 << 20
# The limit at which `a_model` becomes several files.
SHARD = 5_000_000


class Answer(NamedTuple):
    """What a server answers."""

    status: int
    headers: dict[str, str]
    data: bytes = b""


def a_model(seed: int = 0, layers: int = 2) -> dict[str, torch.Tensor]:
    """Some 8 MB in tensors of all kinds: plain, tied, transposed, scalar, empty, of other dtypes."""
    generator = torch.Generator().manual_seed(seed)
    model = {f"layers.{i}.weight": torch.randn(512, 700, generator=generator) for i in range(layers)}
    model["transposed"] = torch.randn(900, 1500, generator=generator).t()
    model["half"] = torch.randn(333, 77, generator=generator).to(torch.bfloat16)
    model["scalar"] = torch.tensor(3.5)
    model["empty"] = torch.empty(0, 4)
    model["tied"] = model["layers.0.weight"]
    return model


def converted_here(model: Path) -> Path:
    """The directory in which a local conversion of `a_model` is, for those from and to elsewhere to equal."""
    convert(model, model.parent / "plain.safetensors")
    convert(model, model.parent / "plain", max_shard_size=SHARD)
    loaded = load_file(model.parent / "plain.safetensors")
    for name, tensor in a_model().items():
        assert name == "tied" or torch.equal(loaded[name], tensor)
    return model.parent


def fresh(prefix: str = "out") -> str:
    """A name that nothing was written under."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def process_serving(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server that `command` starts, for as long as the block runs.

    The server takes a port that is free, and prints its URL when it listens; after that it prints nothing.
    """
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)), None)
        assert found, f"it has ended: {command}"
        yield found[0]
    finally:
        process.terminate()
        process.communicate()


# ---------------------------------------------------------------------------------------------------------- faults

# What is wrong with an answer: nothing (""), "drop" (none comes), "lost" (nor then, but what was asked for is done),
# "503", "403", "cut" (it breaks off), "short" (it is whole, and less than was asked for), "long" (more), "held" (none
# comes, and that only when the proxy is told to `release`).
Rule = Callable[["Asked"], str]
# What becomes of the headers and the body of an answer.
Change = Callable[["Asked", "dict[str, str]", bytes], "tuple[dict[str, str], bytes]"]


def wanted_range(headers: dict[str, str]) -> str:
    """The range that is asked for, in the header of HTTP or in Azure's own; "" if none is."""
    return headers.get("Range") or headers.get("x-ms-range", "")


class Asked:
    """A request that came: its method, path, headers, and how many of this method and path there were before."""

    def __init__(self, method: str, path: str, headers: dict[str, str], before: int) -> None:
        self.method, self.path, self.headers, self.before = method, path, headers, before

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last byte that are asked for, if a range is."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted_range(self.headers))
        return (int(found[1]), int(found[2])) if found else None

    @property
    def reads_range(self) -> bool:
        return self.method == "GET" and self.range is not None


# What answers a request: its method, path with the query, headers and body.
Upstream = Callable[[str, str, Mapping[str, str], bytes], Answer]


def forwarding(url: str) -> Upstream:
    """What another server answers."""
    place = url.removeprefix("http://")

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        with contextlib.closing(http.client.HTTPConnection(place, timeout=600)) as upstream:
            upstream.request(method, path, body or None, dict(headers))
            found = upstream.getresponse()
            return Answer(found.status, dict(found.getheaders()), found.read())

    return answer


class Proxy:
    """Passes requests on to a server, and spoils the answers by `rule` and `change`. `asked` are those that came."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.endpoint = ""
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Spoil nothing, and forget what was asked for."""
        self.rule: Rule = lambda asked: ""
        self.change: Change = lambda asked, headers, data: (headers, data)
        self.asked: list[Asked] = []
        self._times: Counter[tuple[str, str, str]] = Counter()
        self.released = threading.Event()

    def release(self) -> None:
        """Drop what is held, and let pass what comes from now on."""
        self.rule = lambda asked: ""
        self.released.set()

    def take(self, method: str, path: str, headers: dict[str, str]) -> tuple[Asked, str]:
        with self.lock:
            key = (method, path, wanted_range(headers))
            asked = Asked(method, path, headers, self._times[key])
            self._times[key] += 1
            self.asked.append(asked)
        return asked, self.rule(asked)

    @property
    def bytes_asked(self) -> int:
        return sum(last - first + 1 for first, last in (each.range for each in self.asked if each.range))


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # headers and a short answer are sent together
    proxy: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            size = int(self.headers.get("Content-Length", 0))
            data = self.rfile.read(size)
            if len(data) < size:
                raise ConnectionError  # who sent it is gone
            return data
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _pass(self) -> None:
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
        body = self._body()
        asked, fault = self.proxy.take(self.command, self.path, dict(self.headers.items()))
        if fault == "held":
            self.proxy.released.wait(600)
        if fault in ("drop", "held"):
            self._drop()
            return
        if fault.isdigit():
            self._answer(int(fault), {}, b"")
            return
        kept = ("connection", "transfer-encoding", "expect", "content-length")
        headers = {key: value for key, value in self.headers.items() if key.lower() not in kept}
        status, answered, data = self.proxy.upstream(self.command, self.path, headers, body)
        if fault == "lost":
            self._drop()
            return
        length = next((value for key, value in answered.items() if key.lower() == "content-length"), "0")
        found = {key: value for key, value in answered.items() if key.lower() not in kept}
        found, data = self.proxy.change(asked, found, data)
        if fault == "cut":
            self._answer(status, found, data, len(data) // 2)
            self._drop()
            return
        data = {"short": data[: len(data) // 2], "long": data + b"!"}.get(fault, data)
        self._answer(status, found, data, size=int(length) if self.command == "HEAD" else len(data))

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, sent: int | None = None, size: int | None = None
    ) -> None:
        self.send_response_only(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])

    def _drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients go away as they like."""


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server of `handler`, for as long as the block runs; its URL."""
    with _Quiet(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def proxied(upstream: Upstream) -> Iterator[Proxy]:
    """A proxy to what answers requests, for as long as the block runs."""
    proxy = Proxy(upstream)
    with serving(type("Passing", (_Passing,), {"proxy": proxy})) as proxy.endpoint:
        yield proxy
