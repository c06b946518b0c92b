from __future__ import annotations

from collections.abc import Iterator

import pytest
from features.s3.server import S3, Proxy, moto_server, proxy_to, shared

from ckptconv.features.remote import access


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    """A small server that speaks S3. What a module's tests leave there, in the memory of this process, goes with
    them."""
    server = shared()
    yield server
    for key in server.keys(""):
        server.ask("DELETE", key)


@pytest.fixture(scope="session")
def moto() -> Iterator[S3]:
    """moto's server, which takes seconds to start, for tests that ask how S3 itself answers."""
    with moto_server() as server:
        yield server


@pytest.fixture
def proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A link to the server that can be broken, to one that does not wait long before it tries again."""
    monkeypatch.setattr(access, "WAITS", (0.01,) * 2)
    with proxy_to(s3) as made:
        yield made
