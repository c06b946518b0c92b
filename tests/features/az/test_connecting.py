"""A server of Azure that cannot be connected to."""

from __future__ import annotations

import socket
import time

import pytest

from ckptconv.errors import FailedError
from ckptconv.features.remote import access
from ckptconv.storage.location import Location


def test_a_refused_connection_ends_as_soon_as_on_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    monkeypatch.setattr(access, "WAITS", (0.001,) * 2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}/one"
        account = f"DefaultEndpointsProtocol=http;AccountName=one;AccountKey=YQ==;BlobEndpoint={endpoint};"
        begun = time.monotonic()
        with pytest.raises(FailedError, match="Cannot connect to host"):
            _ = Location("az://models/x.pt", {"connection_string": account}).kind
        # The first wait of Azure's own package is of 15 seconds.
        assert time.monotonic() - begun < 12
