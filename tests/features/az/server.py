"""Azurite, which speaks as Azure's blob storage does, in a process of its own: `make test-azure` installs it."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remote import Asked, Proxy, forwarding, fresh, process_serving, proxied
from stores import Served

BUCKET = "models"
AZURITE = Path(__file__).parents[3] / "build/azurite/node_modules/.bin/azurite-blob"
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


class OnAzure(Served):
    """A place on Azure. What is there its own client is asked."""

    def __init__(self, azure: Azure, prefix: str = "", options: dict[str, Any] | None = None) -> None:
        self.azure, self.prefix = azure, prefix or fresh()
        super().__init__(f"az://{BUCKET}/{self.prefix}", azure.options if options is None else options)

    def at(self, name: str) -> OnAzure:
        return OnAzure(self.azure, f"{self.prefix}/{name}", self.options)

    def write(self, name: str, data: bytes) -> None:
        self.azure.client.upload_blob(f"{self.prefix}/{name}", data, overwrite=True)

    def contents(self) -> dict[str, bytes]:
        start = f"{self.prefix}/"
        return {name[len(start) :]: self.azure.get(name) for name in self.azure.names(start)}

    def link(self) -> contextlib.AbstractContextManager[Proxy]:
        return proxied(forwarding(self.azure.endpoint))

    def through(self, link: Proxy) -> OnAzure:
        return OnAzure(self.azure, self.prefix, self.azure.through(link.endpoint))

    def sends(self, asked: Asked) -> bool:
        return asked.method == "PUT" and "comp=block&" in f"{asked.path}&"

    def shows(self, asked: Asked) -> bool:
        return asked.method == "PUT" and "comp=blocklist" in asked.path
