"""Repositories as places on a store, which can be read."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import closed
from features.hub.server import Hub, hub_server
from huggingface_hub import constants
from remote import fresh
from stores import Place


@functools.cache
def shared() -> Hub:
    """The hub that tests of all features share."""
    # No other hub is asked.
    constants.HF_HUB_OFFLINE = False
    os.environ.pop("HF_HUB_OFFLINE", None)
    return closed.at_exit(hub_server(Path(closed.at_exit(tempfile.TemporaryDirectory())) / "root"))


class Repository(Place):
    """A repository of a hub. Each file is put there by a commit."""

    writable = False

    def __init__(self, hub: Hub, name: str = "", files: dict[str, bytes] | None = None) -> None:
        self.hub, self.name = hub, name or f"org/{fresh()}"
        self.files: dict[str, bytes] = {} if files is None else files
        super().__init__(f"hf://{self.name}", hub.options)

    def put(self, path: Path, name: str) -> str:
        for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
            self.files[name if file == path else f"{name}/{file.relative_to(path)}"] = file.read_bytes()
        self.hub.commit(self.name, self.files)
        return f"{self.url}/{name}"
