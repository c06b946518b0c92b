"""An endpoint of S3 that cannot be connected to."""

from __future__ import annotations

import socket
import time

import pytest

from ckptconv.errors import FailedError
from ckptconv.features.remote import access
from ckptconv.storage.location import Location


def test_a_refused_connection_ends_as_soon_as_on_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setattr(access, "WAITS", (0.001,) * 2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        settings = {"key": "a", "secret": "b", "endpoint_url": endpoint, "config_kwargs": {"region_name": "us-east-1"}}
        begun = time.monotonic()
        with pytest.raises(FailedError, match="Could not connect to the endpoint"):
            _ = Location("s3://models/x.pt", settings).kind
        # botocore itself retries four times, after 1, 2, 4 and 8 seconds or less.
        assert time.monotonic() - begun < 3
    assert "retries" not in settings["config_kwargs"]
