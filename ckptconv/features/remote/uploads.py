"""Uploads outputs to stores: each file sequentially, in parts, and visible only when complete.

An upload stays invisible until it is completed, and all files of an output are completed together, the index last. How
a store takes one is the store's own (`stores`). On a file system whose uploads cannot be completed later, files are
written under hidden names and renamed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from ckptconv.errors import CkptconvError, FailedError, UsageError
from ckptconv.features.remote import access, stores
from ckptconv.features.remote.stores import Options
from ckptconv.process import Thread, start_threads
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.writing import Writer

# S3's limits: parts of at least 5 MiB, except the last, and at most 10,000 of them.
PART, PARTS = 5 << 20, 10_000
MOST_PART = 5 << 30
# Parts grow with the allowed memory, up to this size: larger ones are hardly faster.
GOOD_PART = 64 << 20
SENT_AT_A_TIME = 1 << 17


def part_size(size: int, memory: int) -> int:
    """Return the bytes of a part of an upload of `size` bytes, such that two parts fit into `memory` if possible.

    Raises UsageError for a file that is too large for any upload.
    """
    wanted = max(PART, min(memory // 2, GOOD_PART))
    least = -(-size // PARTS)
    if least > MOST_PART:
        most = PARTS * MOST_PART
        raise UsageError(
            f"A file would have {size} bytes, but stores accept at most {most}.", "Use a smaller --max-shard-size."
        )
    unit = 1 << 20
    return max(wanted, -(-least // unit) * unit)


# --------------------------------------------------------------------------------------------------------- uploads


class Upload:
    """An upload of one file. Parts are numbered from 0; `parallel`: several may be sent at a time.

    Once `given_up` is set, failures are not retried.
    """

    parallel = False

    def __init__(self) -> None:
        self.given_up = threading.Event()

    def send(self, number: int, data: memoryview) -> None:
        raise NotImplementedError

    def complete(self) -> None:
        """Make the file visible under its name."""
        raise NotImplementedError

    def abort(self) -> None:
        """Discard the parts that were sent."""
        raise NotImplementedError


class Body(io.RawIOBase):
    """Bytes in memory as the body of a request, without a copy."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        # Little at a time: a caller that asks for all would hold it twice.
        most = len(self._data) if size is None or size < 0 else min(size, SENT_AT_A_TIME)
        data = bytes(self._data[self._at : self._at + most])
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        data = self.read(len(out))
        out[: len(data)] = data
        return len(data)


@functools.cache
def send_bodies_at_once() -> None:
    """Have aiohttp read a `Body` in the thread that sends it. It reads any other file in a thread of its own."""
    from aiohttp import payload

    class _Payload(payload.Payload):
        def __init__(self, value: Body, *args: Any, **kwargs: Any) -> None:
            super().__init__(value, *args, **kwargs)
            self._start = value.tell()
            self._size = len(value) - self._start

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            return self._value.read().decode(encoding, errors)  # type: ignore[no-any-return]

        async def write(self, writer: Any) -> None:
            self._value.seek(self._start)  # it is sent anew where a connection that was kept turns out to be closed
            while data := self._value.read(SENT_AT_A_TIME):
                await writer.write(data)

    payload.PAYLOAD_REGISTRY.register(_Payload, Body, order=payload.Order.try_first)


class RenamedUpload(Upload):
    """A file under a hidden name next to its own, for file systems that can do no more."""

    def __init__(self, fs: Any, inner: str, size: int, part: int) -> None:
        super().__init__()
        self._fs, self._inner = fs, inner
        directory, _, name = inner.rpartition("/")
        self._hidden = f"{directory}/{HIDDEN}{name}"
        if directory.strip("/"):
            fs.makedirs(directory, exist_ok=True)
        # Remove an entry of that name: it may be a link, and writing would follow it.
        with contextlib.suppress(Exception):
            fs.rm_file(self._hidden)
        self._file = fs.open(self._hidden, "wb")

    def send(self, number: int, data: memoryview) -> None:
        self._file.write(data)

    def complete(self) -> None:
        self._file.close()
        self._fs.mv(self._hidden, self._inner)

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._file.close()
        self._fs.rm_file(self._hidden)


# File systems that fsspec makes of others: they can be read only.
_READ_ONLY = {
    **dict.fromkeys(
        ("zip", "tar", "simplecache", "filecache", "blockcache", "cached"), "Specify the URL of the store."
    ),
}


def check_writable(url: str, options: Options | None = None) -> None:
    """Raise UsageError for a URL with a scheme that cannot be written to."""
    fs, _ = access.filesystem(url, options)
    for name in stores.protocols(fs):
        instead = stores.of_scheme(name, url).instead or _READ_ONLY.get(name, "")
        if instead:
            raise UsageError(f"{url}: outputs cannot be written to {name}:.", instead)


# --------------------------------------------------------------------------------------------------------- writers


class UploadBuffers:
    """Memory for `count` parts; `take` waits until one is free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: SimpleQueue[bytearray | None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def take(self, size: int) -> bytearray:
        buffer = self._free.get()
        return buffer if buffer is not None and len(buffer) == size else bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        self._free.put(buffer)


class UploadWriter(Writer):
    """Takes the bytes of a file sequentially, and sends them in parts of `part` bytes.

    Parts are filled in `buffers`, which all files of an output share, while others are sent.
    """

    positioned = False

    def __init__(self, url: str, upload: Upload, size: int, part: int, buffers: UploadBuffers) -> None:
        self._url, self.upload, self._size, self._part, self._buffers = url, upload, size, part, buffers
        self._at = self._number = 0
        self._filling: bytearray | None = None
        self._filled = 0
        self._waiting: SimpleQueue[tuple[int, bytearray, int] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._most = buffers.count - 1 if upload.parallel else 1
        self._failure: BaseException | None = None

    def write_at(self, offset: int, data: memoryview) -> None:
        if offset != self._at:
            raise ValueError(f"{self._url}: byte {offset} follows byte {self._at}")
        while data:
            self._check()
            if self._filling is None:
                self._filling = self._buffers.take(min(self._part, self._size - self._at))
                self._filled = 0
                self._check()
            count = min(len(data), len(self._filling) - self._filled, self._size - self._at)
            self._filling[self._filled : self._filled + count] = data[:count]
            self._filled += count
            self._at += count
            data = data[count:]
            if self._filled == len(self._filling) or self._at == self._size:
                self._hand_over()

    def _hand_over(self) -> None:
        assert self._filling is not None
        if len(self._threads) < self._most:
            self._threads += start_threads([Thread(self._work)])
        part, self._filling = (self._number, self._filling, self._filled), None
        self._number += 1
        if self._threads:
            self._waiting.put(part)
            return
        try:
            self._send(*part)
        finally:
            self._buffers.give_back(part[1])

    def _work(self) -> None:
        for part in iter(self._waiting.get, None):
            try:
                if self._failure is None:
                    self._send(*part)
            except BaseException as error:
                self._failure = error
            self._buffers.give_back(part[1])

    def _send(self, number: int, buffer: bytearray, length: int) -> None:
        self.upload.send(number, memoryview(buffer)[:length])

    def _check(self) -> None:
        if self._failure is not None:
            raise failure(self._url, self._failure) from self._failure

    def sync(self) -> None:
        """Wait until everything that was written is sent."""
        self._end()
        self._check()
        if self._at != self._size:
            raise ValueError(f"{self._url}: {self._at} of {self._size} bytes were written")

    def _end(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._filling is not None:
            self._buffers.give_back(self._filling)
            self._filling = None

    def close(self) -> None:
        """Wait for the parts that are being sent, and send no more."""
        self._failure = self._failure or FailedError(f"{self._url}: writing was cancelled.")
        self.upload.given_up.set()
        self._end()

    def complete(self) -> None:
        with explained(self._url):
            self.upload.complete()

    def abort(self) -> None:
        self.upload.abort()


def failure(url: str, error: BaseException) -> CkptconvError:
    """Return the error for the user if `url` cannot be written."""
    if isinstance(error, CkptconvError):
        return error
    why, hint = access.why(error), access.hint(error)
    if isinstance(error, FileNotFoundError):
        why, hint = "the store has no such location", "Check that the bucket or container exists."
    return FailedError(f"{url} cannot be written: {why}. It was not published.", hint)


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn an error of a store into a FailedError that says what to do."""
    try:
        yield
    except Exception as error:
        raise failure(url, error) from error
