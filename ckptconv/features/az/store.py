"""Reads and writes Azure's blobs, with the clients of adlfs."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ckptconv.features.remote import access
from ckptconv.features.remote.access import ChangedError, ShortReadError, run
from ckptconv.features.remote.stores import Put, Ranges, Store
from ckptconv.features.remote.uploads import Body, Upload, send_bodies_at_once

T = TypeVar("T")


def _ranges(fs: Any, inner: str, size: int, version: str) -> Ranges:
    return lambda start, stop, put: run(fs, _from_azure(fs, inner, version, start, stop, put))


def _settings(fs: Any) -> dict[str, Any]:
    """Return the settings of a request to Azure: the timeouts of `fs`, and no retries but ours.

    Azure's package waits 15 seconds or more before each of its own retries.
    """
    timeouts = {name: fs.storage_options.get(name) for name in ("timeout", "connection_timeout", "read_timeout")}
    return {**{name: value for name, value in timeouts.items() if value is not None}, "retry_total": 0}


def _call(fs: Any, method: str, inner: str, **settings: Any) -> Any:
    """Call a method of `fs`, with no retries of Azure's package for a server that cannot be connected to."""
    policy = getattr(getattr(fs.service_client, "_config", None), "retry_policy", None)
    if policy is not None:
        policy.connect_retries = 0
    return getattr(fs, method)(inner, **settings)


async def _with_blob(fs: Any, inner: str, action: Callable[[Any], Awaitable[T]]) -> T:
    """Call `action` with a client of Azure's package for the blob at a path, and return its result.

    Raises FileNotFoundError if the blob, or its container, does not exist.
    """
    container, name, _ = fs.split_path(inner)
    try:
        async with fs.service_client.get_blob_client(container=container, blob=name) as blob:
            return await action(blob)
    except Exception as error:
        if access.status(error) == 404:
            raise FileNotFoundError(inner) from error
        raise


async def _from_azure(fs: Any, inner: str, version: str, start: int, stop: int, put: Put) -> None:
    from azure.core import MatchConditions

    settings = _settings(fs)
    if version.startswith('"'):
        settings |= {"etag": version, "match_condition": MatchConditions.IfNotModified}

    async def read(blob: Any) -> bytes:
        stream = await blob.download_blob(start, stop - start, version_id=fs.split_path(inner)[2], **settings)
        data: bytes = await stream.readall()
        return data

    try:
        data = await _with_blob(fs, inner, read)
    except Exception as error:
        if access.status(error) == 412:
            raise ChangedError("it has changed to another version") from error
        raise
    if len(data) != stop - start:
        raise ShortReadError(f"{len(data)} bytes arrived, but {stop - start} were requested")
    put(0, data)


class AzureUpload(Upload):
    """Blocks that stay invisible until a block list, sent last, names them.

    Source: the API of Azure block blobs, Put Block and Put Block List. Both may be repeated: a block replaces the one
    of its name, and a list may name blocks that an earlier list named.
    """

    parallel = True

    def __init__(self, fs: Any, inner: str) -> None:
        super().__init__()
        send_bodies_at_once()
        self._fs, self._inner = fs, inner
        self._id = uuid.uuid4().hex[:24]
        self._blocks: dict[int, str] = {}

    def _call(self, action: Callable[[Any], Any]) -> None:
        access.retrying(lambda: run(self._fs, _with_blob(self._fs, self._inner, action)), self.given_up)

    def send(self, number: int, data: memoryview) -> None:
        # All block names in a blob must have the same length. This is adlfs's, whose leftover blocks may be there.
        name = f"{self._id}{number:08d}"
        settings = _settings(self._fs)
        self._call(lambda blob: blob.stage_block(name, Body(data), length=len(data), **settings))
        self._blocks[number] = name

    def complete(self) -> None:
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(self._blocks[number]) for number in sorted(self._blocks)]
        self._call(lambda blob: blob.commit_block_list(blocks, **_settings(self._fs)))

    def abort(self) -> None:
        """Do nothing: there is no such request, and Azure deletes blocks that no list names after a week."""


STORE = Store(
    extra="azure",
    bucket="container",
    call=_call,
    ranges=_ranges,
    upload=lambda fs, inner, size, part: AzureUpload(fs, inner),
)
