"""Servers that speak S3: a small one in a thread of this process, and moto's in its own."""

from __future__ import annotations

import contextlib
import functools
import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import closed
from cells import verify
from features.s3.store import Store
from remote import Asked, Proxy, Upstream, forwarding, fresh, process_serving, proxied
from stores import Served

import ckptconv
from ckptconv.formats.detect import open_source

BUCKET = "models"
# Signed by nobody, and nobody compares: moto asks that there is one.
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


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
    with proxied(store.answer) as unspoilt:
        server = S3(unspoilt.endpoint, store.answer)
        with server.made:
            yield server


@functools.cache
def shared() -> S3:
    """The small server that all tests of this process use, each under names of its own."""
    return closed.at_exit(s3_server())


@contextlib.contextmanager
def proxy_to(s3: S3) -> Iterator[Proxy]:
    """A proxy to S3, for as long as the block runs: one that was used before, if there is any."""
    if not s3.proxies:
        s3.proxies.append(s3.made.enter_context(proxied(s3.upstream)))
    proxy = s3.proxies.pop()
    proxy.reset()
    try:
        yield proxy
    finally:
        proxy.release()
        s3.proxies.append(proxy)


def tried_once(s3: S3, proxy: Proxy) -> dict[str, Any]:
    """Options for a proxy to S3, without the attempts that botocore makes by itself."""
    config = {**s3.options["config_kwargs"], "retries": {"max_attempts": 0}}
    return {**s3.through(proxy.endpoint), "config_kwargs": config}


class OnS3(Served):
    """A place on S3. What is there the store itself is asked, which takes less than s3fs does."""

    def __init__(self, s3: S3, prefix: str = "", options: dict[str, Any] | None = None) -> None:
        self.s3, self.prefix = s3, prefix or fresh()
        super().__init__(f"s3://{BUCKET}/{self.prefix}", s3.options if options is None else options)

    def at(self, name: str) -> OnS3:
        return OnS3(self.s3, f"{self.prefix}/{name}", self.options)

    def write(self, name: str, data: bytes) -> None:
        self.s3.ask("PUT", f"{self.prefix}/{name}", data)

    def contents(self) -> dict[str, bytes]:
        return self.s3.contents(f"{self.prefix}/")

    def link(self) -> contextlib.AbstractContextManager[Proxy]:
        return proxy_to(self.s3)

    def through(self, link: Proxy) -> OnS3:
        return OnS3(self.s3, self.prefix, tried_once(self.s3, link))

    def sends(self, asked: Asked) -> bool:
        return asked.method == "PUT" and "partNumber" in asked.path

    def shows(self, asked: Asked) -> bool:
        is_whole = asked.method == "PUT" and "partNumber" not in asked.path
        return is_whole or (asked.method == "POST" and "uploadId" in asked.path)

    def unfinished(self) -> list[str]:
        return self.s3.uploads(f"{self.prefix}/")


def verified_with_few_requests(url: str, s3: S3, proxy: Proxy) -> Any:
    """Convert a checkpoint on the store, and verify its output by few requests."""
    options = tried_once(s3, proxy)
    ckptconv.convert(url, f"{url}.safetensors", storage_options=s3.options)
    source = open_source(url, storage_options=options)
    before = len(proxy.asked)
    done = verify(source, f"{url}.safetensors", storage_options=options)
    asked = [each for each in proxy.asked[before:] if each.reads_range]
    assert len(asked) < 60
    assert sum(last - first for first, last in (each.range for each in asked)) < 1.2 * done.bytes_read
    return done
