"""Servers for the tests: moto's S3 in a process of its own, and HTTP servers in threads of this one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUCKET = "models"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class S3:
    """A server that speaks S3, with one bucket. `options` are what fsspec needs to reach it."""

    def __init__(self, endpoint: str) -> None:
        import botocore.session

        self.endpoint = endpoint
        self.options = {"endpoint_url": endpoint, "key": "test", "secret": "test"}
        self.client = botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def through(self, endpoint: str) -> dict[str, Any]:
        """Options to reach it through a proxy."""
        return {**self.options, "endpoint_url": endpoint}

    def put(self, directory: Path, prefix: str) -> str:
        """Upload a file or a directory. Returns its URL."""
        files = [directory] if directory.is_file() else [path for path in directory.rglob("*") if path.is_file()]
        for path in files:
            key = prefix if path == directory else f"{prefix}/{path.relative_to(directory)}"
            with path.open("rb") as body:
                self.client.put_object(Bucket=BUCKET, Key=key, Body=body)
        return f"s3://{BUCKET}/{prefix}"

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(row["Key"] for page in pages for row in page.get("Contents", ()))

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def fetch(self, prefix: str, directory: Path) -> Path:
        """Download everything under a prefix."""
        for key in self.keys(prefix):
            path = directory / key[len(prefix) :].lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(key))
        return directory

    def uploads(self) -> list[str]:
        """The names of uploads that are under way, or were left."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """moto's server, for as long as the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **CREDENTIALS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(endpoint, timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        server = S3(endpoint)
        server.client.create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.terminate()
        process.wait()
