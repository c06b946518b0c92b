"""Uploads outputs to stores: each file sequentially, in parts, and visible only when complete.

An upload stays invisible until it is completed, and all files of an output are completed together, the index last. S3
and Azure's stores are accessed directly, with several parts sent at a time; Google's through the file objects of its
fsspec package. On a file system whose uploads cannot be completed later, files are written under hidden names and
renamed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from queue import Queue
from typing import Any

from ckptconv.errors import CkptconvError, FailedError, UsageError
from ckptconv.process import Thread, start_threads
from ckptconv.storage import remote
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.writing import Writer

Options = Mapping[str, Any]

# S3's limits: parts of at least 5 MiB, except the last, and at most 10,000 of them.
PART, PARTS = 5 << 20, 10_000
MOST_PART = 5 << 30
# Parts grow with the allowed memory, up to this size: larger ones are hardly faster.
GOOD_PART = 64 << 20
# Smaller files are sent with one request, on commit.
SMALL = 1 << 16
SENT_AT_A_TIME = 1 << 17


def part_size(size: int, memory: int) -> int:
    """Return the bytes of a part of an upload of `size` bytes, such that two parts fit into `memory` if possible.

    Raises UsageError for a file that is too large for any upload.
    """
    wanted = max(PART, min(memory // 2, GOOD_PART))
    least = -(-size // PARTS)
    if least > MOST_PART:
        raise UsageError(f"A file of {size} bytes is larger than a store takes.", "Use a smaller --max-shard-size.")
    unit = 1 << 20
    return max(wanted, -(-least // unit) * unit)


# --------------------------------------------------------------------------------------------------------- uploads


class Upload:
    """An upload of one file. Parts are numbered from 0; `parallel` tells whether several may be sent at a time.

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
        """Discard what was sent."""
        raise NotImplementedError


class _Body(io.RawIOBase):
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
def _send_bodies_at_once() -> None:
    """Have aiohttp read a `_Body` in the thread that sends it. It reads any other file in a thread of its own."""
    from aiohttp import payload

    class BodyPayload(payload.Payload):
        def __init__(self, value: _Body, *args: Any, **kwargs: Any) -> None:
            super().__init__(value, *args, **kwargs)
            self._start = value.tell()
            self._size = len(value) - self._start

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            return self._value.read().decode(encoding, errors)  # type: ignore[no-any-return]

        async def write(self, writer: Any) -> None:
            self._value.seek(self._start)  # it is sent anew where a connection that was kept turns out to be closed
            while data := self._value.read(SENT_AT_A_TIME):
                await writer.write(data)

    payload.PAYLOAD_REGISTRY.register(BodyPayload, _Body, order=payload.Order.try_first)


class S3Upload(Upload):
    """A multipart upload, or for a small file one request at the end.

    Source: the S3 API, CreateMultipartUpload and related operations.
    """

    parallel = True

    def __init__(self, fs: Any, inner: str, size: int) -> None:
        super().__init__()
        _send_bodies_at_once()
        self._fs, self._size = fs, size
        self._bucket, self._key, _ = fs.split_path(inner)
        self._where = {"Bucket": self._bucket, "Key": self._key}
        self._etags: dict[int, dict[str, Any]] = {}
        self._small = b""
        self._id = self._call("create_multipart_upload")["UploadId"] if size > SMALL else ""

    def _call(self, method: str, **arguments: Any) -> Any:
        settings = self._fs.s3_additional_kwargs  # such as encryption; s3fs drops those that a method does not accept
        return remote.retrying(lambda: self._fs.call_s3(method, settings, **self._where, **arguments), self.given_up)

    def send(self, number: int, data: memoryview) -> None:
        if not self._id:
            self._small += bytes(data)
            return
        made = remote.retrying(lambda: remote.run(self._fs, self._send(number + 1, _Body(data))), self.given_up)
        sums = {key: value for key, value in made.items() if key.startswith("Checksum") and key != "ChecksumType"}
        self._etags[number] = {"PartNumber": number + 1, "ETag": made["ETag"], **sums}

    async def _send(self, number: int, body: _Body) -> Any:
        # Not call_s3, which would retry with a body that is already read to the end.
        client, known = await remote.s3_client(self._fs, self._bucket, "UploadPart")
        return await client.upload_part(**known, **self._where, UploadId=self._id, PartNumber=number, Body=body)

    def complete(self) -> None:
        if not self._id:
            self._call("put_object", Body=self._small)
            return
        parts = {"Parts": [self._etags[number] for number in sorted(self._etags)]}
        try:
            self._call("complete_multipart_upload", UploadId=self._id, MultipartUpload=parts)
        except FileNotFoundError:
            # The response to an earlier attempt may have been lost.
            if not self._is_complete():
                raise
        self._id = ""

    def _is_complete(self) -> bool:
        """Whether the object there may be this upload: its ETag ends with the number of parts."""
        try:
            found = self._call("head_object")
        except FileNotFoundError:
            return False
        tag = str(found.get("ETag", "")).strip('"')
        return found["ContentLength"] == self._size and tag.endswith(f"-{len(self._etags)}")

    def abort(self) -> None:
        if self._id:
            upload, self._id = self._id, ""
            self._fs.call_s3("abort_multipart_upload", **self._where, UploadId=upload)


class FileUpload(Upload):
    """An fsspec file that is opened with `autocommit=False`, and committed on `complete`."""

    def __init__(self, fs: Any, inner: str, size: int, part: int) -> None:
        super().__init__()
        self._file = fs.open(inner, "wb", block_size=part, autocommit=False)

    def send(self, number: int, data: memoryview) -> None:
        self._file.write(data)

    def complete(self) -> None:
        self._file.close()
        self._file.commit()

    def abort(self) -> None:
        # Closing would send the rest, and could complete the upload.
        self._file.closed = True
        self._file.discard()


class AzureUpload(Upload):
    """Blocks that stay invisible until a block list, sent last, names them.

    Source: the API of Azure block blobs, Put Block and Put Block List. Both may be repeated: a block replaces the one
    of its name, and a list may name what an earlier one named.
    """

    parallel = True

    def __init__(self, fs: Any, inner: str) -> None:
        super().__init__()
        _send_bodies_at_once()
        self._fs, self._inner = fs, inner
        self._id = uuid.uuid4().hex[:24]
        self._blocks: dict[int, str] = {}

    def _call(self, action: Callable[[Any], Any]) -> None:
        remote.retrying(lambda: remote.run(self._fs, remote.with_blob(self._fs, self._inner, action)), self.given_up)

    def send(self, number: int, data: memoryview) -> None:
        # All block names in a blob must have the same length; this is adlfs's, whose leftovers may be there.
        name = f"{self._id}{number:08d}"
        settings = remote.azure_settings(self._fs)
        self._call(lambda blob: blob.stage_block(name, _Body(data), length=len(data), **settings))
        self._blocks[number] = name

    def complete(self) -> None:
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(self._blocks[number]) for number in sorted(self._blocks)]
        self._call(lambda blob: blob.commit_block_list(blocks, **remote.azure_settings(self._fs)))

    def abort(self) -> None:
        """Do nothing: there is no such request, and blocks that no list names are deleted after a week."""


class RenamedUpload(Upload):
    """A file under a hidden name beside its own, for file systems that can do no more."""

    def __init__(self, fs: Any, inner: str, size: int, part: int) -> None:
        super().__init__()
        self._fs, self._inner = fs, inner
        directory, _, name = inner.rpartition("/")
        self._hidden = f"{directory}/{HIDDEN}{name}"
        if directory.strip("/"):
            fs.makedirs(directory, exist_ok=True)
        # Remove what is there: it may be a link, and writing would follow it.
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


KINDS: dict[str, Callable[[Any, str, int, int], Upload]] = {
    **dict.fromkeys(("s3", "s3a"), lambda fs, inner, size, part: S3Upload(fs, inner, size)),
    **dict.fromkeys(("gs", "gcs"), FileUpload),
    **dict.fromkeys(("abfs", "abfss", "az"), lambda fs, inner, size, part: AzureUpload(fs, inner)),
}
# Schemes that can be read, but not written as uploads are.
_READ_ONLY = {
    **dict.fromkeys(("http", "https"), "Servers of plain files take none."),
    "hf": "Write it to a local directory, and upload that with `hf upload`.",
    **dict.fromkeys(("zip", "tar", "simplecache", "filecache", "blockcache", "cached"), "Give the URL of the store."),
}


def check_writable(url: str, options: Options | None = None) -> None:
    """Raise UsageError for a URL with a scheme that cannot be written to."""
    fs, _ = remote.filesystem(url, options)
    for name in remote.protocols(fs):
        if name in _READ_ONLY:
            raise UsageError(f"{url}: outputs cannot be written to {name}:.", _READ_ONLY[name])


# --------------------------------------------------------------------------------------------------------- writers


class UploadBuffers:
    """Memory for `count` parts; `take` waits until one is free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: Queue[bytearray | None] = Queue()
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
        self._waiting: Queue[tuple[int, bytearray, int] | None] = Queue()
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
        self._failure = self._failure or FailedError(f"{self._url}: writing was given up.")
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
    missing = "Does the bucket or container exist?"
    hint = missing if isinstance(error, FileNotFoundError) else remote.hint(error)
    return FailedError(f"{url} cannot be written: {remote.why(error)}. Nothing was put under its name.", hint)


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn an error of a store into a FailedError that says what to do."""
    try:
        yield
    except Exception as error:
        raise failure(url, error) from error
