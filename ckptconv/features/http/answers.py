"""Answers of servers as their bytes come: watched, and compared with the range and version that were asked for.

For stores whose clients work in the thread of an asynchronous file system (`access.run`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ckptconv.features.http.object_checksums import Check
from ckptconv.features.remote.access import ChangedError, HungError, ShortReadError, WrongAnswerError, run
from ckptconv.features.remote.stores import Put
from ckptconv.storage import stores

T = TypeVar("T")

# Bytes that are read from a connection at a time.
CHUNK = 1 << 18
# Seconds without a byte after which the user is informed of a wait, and after which the request is given up.
NOTICE, PATIENCE = 10.0, 60.0


def call_soon(fs: Any, method: str, inner: str, **settings: Any) -> Any:
    """Return the answer of a file system's method "info" or "ls" for a path. It waits no longer than for bytes."""
    return run(fs, soon(getattr(fs, f"_{method}")(inner, **settings), inner))


class _Watch:
    """Waits for a server in this task: raises HungError in it once nothing has come for `PATIENCE` seconds, counted
    anew from each call of `came`."""

    def __init__(self, inner: str) -> None:
        import asyncio

        self._inner, self._cancelled = inner, asyncio.CancelledError
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._is_reported = self._is_hung = False

    def __enter__(self) -> _Watch:
        self.came()
        self._look()
        return self

    def came(self) -> None:
        self._since, self._is_reported = self._loop.time(), False

    def _look(self) -> None:
        """Look how long nothing has come, and again when it may have been too long."""
        waited = self._loop.time() - self._since
        if waited >= PATIENCE:
            self._is_hung = True
            assert self._task is not None
            self._task.cancel()
            return
        if waited >= NOTICE and not self._is_reported:
            self._is_reported = True
            stores.on_wait(f"Waiting for {self._inner}: its server sent no data for {NOTICE:g} seconds.")
        until = PATIENCE if self._is_reported else min(NOTICE, PATIENCE)
        self._timer = self._loop.call_later(until - waited, self._look)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._is_hung and kind is self._cancelled:
            raise HungError(f"its server sent no data for {PATIENCE:g} seconds") from None


async def soon(waited: Awaitable[T], inner: str) -> T:
    """Return the result of `waited`. Raises HungError if it takes longer than `PATIENCE` seconds."""
    with _Watch(inner):
        return await waited


def check_range(header: str, start: int, stop: int, size: int | None) -> None:
    """Raise an error unless `header`, the range that an answer says it is, is bytes `start` to `stop` of `size`."""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", header.strip())
    if match is None or (int(match[1]), int(match[2])) != (start, stop - 1):
        answered = f"{header[:80]!r}" if header else "no range"
        raise WrongAnswerError(f"its server answered with {answered}, but bytes {start}-{stop - 1} were requested")
    if size is not None and match[3] not in ("*", str(size)):
        raise ChangedError(f"its size changed from {size} to {match[3]} bytes")


def check_version(stated: str | None, version: str) -> None:
    """Raise ChangedError if `stated`, an answer's ETag, is that of another version."""
    if stated and version.startswith(('"', "W/")) and stated.removeprefix("W/") != version.removeprefix("W/"):
        raise ChangedError("it has changed to another version")


async def pass_on(
    read: Callable[[int], Awaitable[bytes]],
    length: int | None,
    put: Put,
    inner: str,
    checksums: Iterable[tuple[str, bytes]] = (),
) -> None:
    done = 0
    check = Check(checksums, length or 0)
    # One timer for all pieces: they are many, and most come at once.
    with _Watch(inner) as watch:
        while data := await read(CHUNK):
            watch.came()
            if length is not None and done + len(data) > length:
                raise ShortReadError(f"more than the requested {length} bytes arrived")
            put(done, data)
            check.update(data)
            done += len(data)
    if length is not None and done != length:
        raise ShortReadError(f"{done} bytes arrived, but {length} were requested")
    if check.wrong:
        raise WrongAnswerError(f"the data does not match the checksum ({check.wrong}) that its server sent")
