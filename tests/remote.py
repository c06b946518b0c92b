"""Servers for the tests: a small S3 and HTTP servers in threads of this process, moto's S3 and Azurite in their own."""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import torch
from s3_store import Answer, Store
from safetensors.torch import load_file

from ckptconv import convert

KIB, MIB = 1 << 10, 1 << 20
BUCKET = "models"
# Signed by nobody, and nobody compares: moto asks that there is one.
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
# The limit at which `a_model` becomes several files.
SHARD = 5_000_000
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


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


class S3:
    """A server that speaks S3, with one bucket. `options` are what fsspec needs to reach it."""

    def __init__(self, endpoint: str, upstream: Upstream) -> None:
        self.endpoint, self.upstream = endpoint, upstream
        self.made = contextlib.ExitStack()
        # Those that nobody uses now. For each new address s3fs makes a client, which takes longer than most tests.
        self.proxies: list[Proxy] = []
        # What botocore says of itself it puts together twice for each request, in a tenth of the time that this takes.
        config = {"user_agent": "tests"}
        self.options = {"endpoint_url": endpoint, "key": "test", "secret": "test", "config_kwargs": config}

    @functools.cached_property
    def client(self) -> Any:
        """A client of botocore's. What the tests themselves put and look at they ask the store, which takes less."""
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def ask(self, method: str, key: str = "", data: bytes = b"", **query: str) -> bytes:
        """What the store itself answers about an object, or without a key about the bucket."""
        path = quote(f"/{BUCKET}/{key}" if key else f"/{BUCKET}")
        answer = self.upstream(method, f"{path}?{urlencode(query)}" if query else path, _SIGNED, data)
        assert answer.status < 300, (method, key, answer)
        return answer.data

    def through(self, endpoint: str) -> dict[str, Any]:
        """Options to reach it through a proxy."""
        return {**self.options, "endpoint_url": endpoint}

    def put(self, directory: Path, prefix: str) -> str:
        """Upload a file or a directory. Returns its URL."""
        files = [directory] if directory.is_file() else [path for path in directory.rglob("*") if path.is_file()]
        for path in files:
            key = prefix if path == directory else f"{prefix}/{path.relative_to(directory)}"
            self.ask("PUT", key, path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def keys(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        while True:
            told = self.ask("GET", prefix=prefix, **{"list-type": "2", "start-after": found[-1] if found else ""})
            found += _told(told, "Key")
            if _told(told, "IsTruncated") == ["false"]:
                return found

    def get(self, key: str) -> bytes:
        return self.ask("GET", key)

    def contents(self, prefix: str) -> dict[str, bytes]:
        """All under a prefix, by what follows it in their names."""
        return {key[len(prefix) :].lstrip("/"): self.get(key) for key in self.keys(prefix)}

    def fetch(self, prefix: str, directory: Path) -> Path:
        """Download everything under a prefix."""
        for name, data in self.contents(prefix).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return directory

    def uploads(self, prefix: str) -> list[str]:
        """The names of uploads under a prefix that are under way, or were left."""
        return _told(self.ask("GET", uploads="", prefix=prefix), "Key")


def _told(answer: bytes, name: str) -> list[str]:
    """What the elements of a name hold."""
    return [html.unescape(each) for each in re.findall(rf"<{name}>(.*?)</{name}>", answer.decode(), re.DOTALL)]


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


_MOTO = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def moto_server() -> Iterator[S3]:
    """moto's server, for as long as the block runs. Tests share one: the fixture `moto`."""
    with process_serving([sys.executable, "-c", _MOTO], CREDENTIALS) as endpoint:
        server = S3(endpoint, forwarding(endpoint))
        server.ask("PUT")
        with server.made:
            yield server


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """A small server of our own, for as long as the block runs. Tests share one: the fixture `s3`."""
    store = Store(BUCKET)
    with _proxy(store.answer) as unspoilt:
        server = S3(unspoilt.endpoint, store.answer)
        with server.made:
            yield server


# ----------------------------------------------------------------------------------------------------------- Azure

# Where `make test-azure` installs it.
AZURITE = Path(__file__).parents[1] / "build/azurite/node_modules/.bin/azurite-blob"
ACCOUNT = "devstoreaccount1"


class Azure:
    """A server that speaks as Azure's blob storage does, with one container. `options` are what adlfs needs."""

    def __init__(self, endpoint: str, key: str) -> None:
        from azure.storage.blob import BlobServiceClient

        self.endpoint, self._key = endpoint, key
        self.options = self.through(endpoint)
        service = BlobServiceClient.from_connection_string(self.options["connection_string"])
        self.client = service.get_container_client(BUCKET)

    def through(self, endpoint: str) -> dict[str, Any]:
        """Options to reach it through a proxy."""
        protocol = endpoint.partition("://")[0]
        parts = {
            "DefaultEndpointsProtocol": protocol,
            "AccountName": ACCOUNT,
            "AccountKey": self._key,
            "BlobEndpoint": f"{endpoint}/{ACCOUNT}",
        }
        return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items())}

    def put(self, directory: Path, prefix: str) -> str:
        """Upload a file or a directory. Returns its URL."""
        files = [directory] if directory.is_file() else [path for path in directory.rglob("*") if path.is_file()]
        for path in files:
            name = prefix if path == directory else f"{prefix}/{path.relative_to(directory)}"
            with path.open("rb") as body:
                self.client.upload_blob(name, body, overwrite=True)
        return f"az://{BUCKET}/{prefix}"

    def names(self, prefix: str = "") -> list[str]:
        return sorted(self.client.list_blob_names(name_starts_with=prefix))

    def get(self, name: str) -> bytes:
        data: bytes = self.client.download_blob(name).readall()
        return data

    def fetch(self, prefix: str, directory: Path) -> Path:
        """Download everything under a prefix."""
        for name in self.names(prefix):
            path = directory / name[len(prefix) :].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(name))
        return directory


@contextlib.contextmanager
def azure_server() -> Iterator[Azure]:
    """Azurite, for as long as the block runs, with an account of which nobody else knows the key."""
    key = base64.b64encode(os.urandom(64)).decode()
    command = [
        str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", "0",
        "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    with process_serving(command, {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}) as endpoint:
        server = Azure(endpoint, key)
        server.client.create_container()
        yield server


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
def _proxy(upstream: Upstream) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    with serving(type("Passing", (_Passing,), {"proxy": proxy})) as proxy.endpoint:
        yield proxy


@contextlib.contextmanager
def proxy_to(upstream: str | S3) -> Iterator[Proxy]:
    """A proxy to a server, for as long as the block runs; to S3, one that was used before, if there is any."""
    if isinstance(upstream, str):
        with _proxy(forwarding(upstream)) as proxy:
            yield proxy
        return
    if not upstream.proxies:
        upstream.proxies.append(upstream.made.enter_context(_proxy(upstream.upstream)))
    proxy = upstream.proxies.pop()
    proxy.reset()
    try:
        yield proxy
    finally:
        proxy.release()
        upstream.proxies.append(proxy)


def tried_once(s3: S3, proxy: Proxy) -> dict[str, Any]:
    """Options for a proxy to S3, without the attempts that botocore makes by itself."""
    config = {**s3.options["config_kwargs"], "retries": {"max_attempts": 0}}
    return {**s3.through(proxy.endpoint), "config_kwargs": config}


# ------------------------------------------------------------------------------------------------------------ HTTP


def http_server(directory: Path, *, ranges: bool = True) -> contextlib.AbstractContextManager[Proxy]:
    """A server of the files in `directory`, with ranges or without."""

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        file = directory / unquote(urlsplit(path).path.lstrip("/"))
        if method not in ("GET", "HEAD"):
            return Answer(501, {})
        if not file.is_file():
            return Answer(404, {})
        size = file.stat().st_size
        told = {"ETag": f'"{file.stat().st_mtime_ns:x}"', "Content-Length": str(size)}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", "")) if ranges else None
        start, last = (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)
        if found:
            told |= {"Content-Range": f"bytes {start}-{last}/{size}", "Content-Length": str(last + 1 - start)}
        if method == "HEAD":
            return Answer(206 if found else 200, told)
        with file.open("rb") as opened:
            opened.seek(start)
            return Answer(206 if found else 200, told, opened.read(last + 1 - start))

    return _proxy(answer)
