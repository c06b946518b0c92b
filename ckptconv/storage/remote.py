"""Remote files, through fsspec: file systems, listings, ranged reads, and retries.

Nothing is cached that could be stale: listings are requested anew, and no data is kept. The caller chooses the ranges;
fsspec's own caches, which prefetch or fetch whole files, are not used. No server is trusted: its answer has to say that
it is the requested range and version, and a file that is read whole has to match the checksums that the server gives.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from ckptconv.errors import CkptconvError, FailedError, MissingError, UsageError
from ckptconv.text import install

Options = Mapping[str, Any]
T = TypeVar("T")

# Bytes that are read from a connection at a time.
CHUNK = 1 << 18

# Seconds to wait before each retry, about: each is multiplied by a random factor, so that clients do not retry in step.
WAITS = (0.2, 0.6, 1.8, 5.4, 10.0)
# Seconds without a byte after which the user is told of a wait, and after which it is given up; and after how many such
# waits there are no more retries.
NOTICE, PATIENCE, HANGS = 10.0, 60.0, 2

# Keys of a file's info that identify its version, for all file systems: the first that is present counts.
_STAMPS = (
    "ETag", "etag", "generation", "md5Hash", "blob_id", "md5", "LastModified", "last_modified", "Last-Modified",
    "updated", "mtime", "modificationTime", "created",
)  # fmt: skip
# Transient statuses of HTTP below 500: timeout, too early, too many requests. And lasting ones above.
_PASSING, _LASTING = (408, 425, 429), (501, 505)
# Names of the classes of errors for broken connections: of the standard library, aiohttp, botocore, requests, azure,
# google. An error that descends from one is transient. By name, as none of these packages is imported here.
_BROKEN = {
    "TimeoutError", "ConnectionError", "IncompleteReadError", "IncompleteRead", "HTTPException", "ClientPayloadError",
    "ClientConnectionError", "HTTPClientError", "ResponseParserError", "ReadTimeout", "ChunkedEncodingError",
    "ServiceRequestError", "ServiceResponseError", "IncompleteReadException", "TransportError", "SSLError",
    "ProtocolError", "FlexibleChecksumError",
}  # fmt: skip
# Errors of the operating system, also as fsspec raises them, for a connection or server that may be back soon.
_PASSING_ERRNOS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH,
    errno.ENETRESET, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
# A path in a repository of the Hugging Face hub at a commit, with the scheme or without.
_PINNED = re.compile(r"(?:hf://)?(?:(?:models|datasets|spaces|kernels)/)?[^/@]+/[^/@]+@[0-9a-f]{40}(?:/|$)")
_LASTING_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


class ShortReadError(OSError):
    """A server gave fewer or more bytes than were requested."""


class WrongAnswerError(OSError):
    """A server gave something other than was requested, or than it says it gives."""


class HungError(OSError):
    """A server sent nothing for a long time."""


class ChangedError(OSError):
    """The file is no longer the version that was opened."""


# The transient ones of these.
_OURS = (ShortReadError, WrongAnswerError, HungError)


class NoRangesError(OSError):
    """A server gives whole files only."""


def filesystem(url: str, options: Options | None = None) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path inside it. Raises UsageError if there is none."""
    import fsspec

    try:
        fs, inner = fsspec.core.url_to_fs(url, **(options or {}))
    except ImportError as error:
        raise UsageError(f"{url} needs a package that is not installed: {error}.", _extra(url)) from error
    except CkptconvError:  # of the file system of this package, which opens a checkpoint
        raise
    except FileNotFoundError as error:
        raise MissingError(f"{url} cannot be opened: {error} does not exist.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{url} cannot be opened: {error}.", "See --storage-options.") from error
    except Exception as error:  # of a package that the protocol needs
        raise FailedError(f"{url} cannot be opened: {why(error)}.", hint(error)) from error
    return fs, inner


def protocols(fs: Any) -> tuple[str, ...]:
    """Return the protocols that stand for a file system in URLs."""
    named = fs.protocol
    return (named,) if isinstance(named, str) else tuple(named)


# The extra that brings what a protocol needs.
_EXTRAS = {
    protocol: extra
    for extra, its in {
        "azure": "az abfs abfss",
        "gcs": "gs gcs",
        "http": "http https",
        "hub": "hf",
        "s3": "s3 s3a",
    }.items()
    for protocol in its.split()
}


def _extra(url: str) -> str:
    extra = _EXTRAS.get(url.rpartition("::")[2].partition("://")[0])
    return install(extra) if extra else ""


# What the hub's errors say, by the name of their class, and what to do.
_OF_THE_HUB = {
    "GatedRepoError": (
        "its repository is gated, and access to it was not granted",
        "Ask for access on its page of the hub, and set HF_TOKEN to a token of yours, or run `hf auth login`.",
    ),
    "DisabledRepoError": ("its repository is disabled on the hub", "Look at its page of the hub."),
}


def why(error: BaseException) -> str:
    """Return what went wrong, in one line."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if type(error).__name__ in _OF_THE_HUB:
        return _OF_THE_HUB[type(error).__name__][0]
    text = " ".join(str(error).split())
    if isinstance(error, PermissionError):
        return f"permission denied ({text})" if text else "permission denied"
    if isinstance(error, OSError) and error.strerror:
        return " ".join(error.strerror.lower().split())
    if isinstance(error, (*_OURS, ChangedError, NoRangesError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def hint(error: BaseException) -> str:
    """Return what a user may do about an error; "" if nothing is known to help."""
    if type(error).__name__ in _OF_THE_HUB:
        return _OF_THE_HUB[type(error).__name__][1]
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or _status(error) in (401, 403):
        return "Check the credentials, and what they may do: the environment's, fsspec's, or --storage-options."
    if is_transient(error):
        return "It was tried several times: try it again later."
    return ""


# ---------------------------------------------------------------------------------------------------- trying again


def retrying(action: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Return the result of `action`. Retry it after transient errors, with ever longer waits, until `stop` is set."""
    stop = stop or threading.Event()
    hangs = 0
    for wait in WAITS:
        try:
            return action()
        except Exception as error:
            hangs += isinstance(error, HungError)
            if not is_transient(error) or hangs == HANGS:
                raise
            import random  # it takes long to import, and is rarely needed

            if stop.wait(wait * random.uniform(0.5, 1.5)):
                raise
    return action()


def is_transient(error: BaseException) -> bool:
    """Whether a retry may work: for broken connections, timeouts, busy servers."""
    if isinstance(error, (CkptconvError, ChangedError, NoRangesError)):
        return False
    # This comes before the status, because aiohttp gives a broken connection a status that no server sent.
    if isinstance(error, _OURS) or any(kind.__name__ in _BROKEN for kind in type(error).__mro__):
        return True
    status = _status(error)
    if status:
        return status in _PASSING or (status >= 500 and status not in _LASTING)
    if isinstance(error, _LASTING_ERRORS):
        # A file system may report as missing whatever it cannot look at.
        return error.__cause__ is not None and is_transient(error.__cause__)
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


def _status(error: BaseException) -> int:
    """Return the status of HTTP that an error, or what caused it, reports; 0 if none does."""
    for each in _causes(error):
        for name in ("status", "status_code", "code"):
            value = getattr(each, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):
            value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(value, int):
                return value
    return 0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__


# ------------------------------------------------------------------------------------------------ what stands where


def info(fs: Any, inner: str) -> dict[str, Any] | None:
    """Return fsspec's info of a path, requested anew; None if nothing is there."""
    if inner.endswith("/") and _is_http(fs):
        return {"type": "directory"}  # its listing, if any, is a page of links
    _refresh(fs, inner)
    try:
        found: dict[str, Any] = retrying(lambda: _asked(fs, "info", inner))
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_transient(error) or _status(error) in (401, 403):
            raise error.__cause__ or error from None
        return None
    return found


def names(fs: Any, inner: str) -> list[dict[str, Any]]:
    """List a directory, requested anew. Each entry is as `info` returns it."""
    _refresh(fs, inner)
    rows: list[dict[str, Any]] = retrying(lambda: _asked(fs, "ls", inner, detail=True))
    if _is_http(fs):
        # Links may lead anywhere, or to other views of the same page.
        return [
            row
            for row in rows
            if row["name"].rstrip("/").rpartition("/")[0] == inner.rstrip("/") and not re.search("[?#]", row["name"])
        ]
    return rows


def _refresh(fs: Any, inner: str) -> None:
    """Forget what a file system keeps of listings, unless it can never change."""
    if not (_is_hub(fs) and is_pinned(inner)):
        fs.invalidate_cache()


def _asked(fs: Any, what: str, inner: str, **settings: Any) -> Any:
    """Return what the method `what` of `fs` says of a path. On HTTP and S3, wait no longer than for any answer."""
    if _is_http(fs) or _is_s3(fs):
        return run(fs, _soon(getattr(fs, f"_{what}")(inner, **settings), inner))
    return getattr(fs, what)(inner, **settings)


def _is_http(fs: Any) -> bool:
    return bool({"http", "https"} & set(protocols(fs)))


def _is_s3(fs: Any) -> bool:
    return bool({"s3", "s3a"} & set(protocols(fs)))


def _is_hub(fs: Any) -> bool:
    return "hf" in protocols(fs)


def is_pinned(inner: str) -> bool:
    """Whether a path of the Hugging Face hub names a commit, so that what is there never changes."""
    return _PINNED.match(inner) is not None


def stamp(row: Mapping[str, Any]) -> str:
    """Return what identifies this version of a file, as far as its file system says; "" if it does not."""
    value = next((row[key] for key in _STAMPS if row.get(key)), "")
    # Some file systems give a time in one form in a listing, and in another for a single file.
    seconds = value.timestamp() if hasattr(value, "timestamp") else value
    return f"{seconds:f}" if isinstance(seconds, float) else str(seconds)


# ----------------------------------------------------------------------------------------------------------- ranges

# Takes the number of bytes that came before, and the bytes that came.
Put = Callable[[int, bytes], None]
# Reads bytes `start` to `stop` of a file with one request, and passes them on as they come.
Ranges = Callable[[int, int, Put], None]


def ranges(fs: Any, inner: str, size: int, version: str) -> Ranges:
    """Return a function that reads ranges of a file of `size` bytes, and that several threads may call.

    It reads the version that `stamp` returned, if the store can, and raises ChangedError once there is another. It
    raises NoRangesError if the server gives whole files only, WrongAnswerError if it gives anything but the requested
    range, and HungError if it sends nothing.
    """
    if _is_http(fs):
        return lambda start, stop, put: run(fs, _from_http(fs, inner, size, version, start, stop, put))
    if _is_s3(fs):
        return lambda start, stop, put: run(fs, _from_s3(fs, inner, size, version, start, stop, put))
    if {"abfs", "az", "abfss"} & set(protocols(fs)):
        return lambda start, stop, put: run(fs, _from_azure(fs, inner, version, start, stop, put))
    if fs.async_impl:
        return lambda start, stop, put: put(0, fs.cat_file(inner, start=start, end=stop))

    # The hub's file system would ask for the size before each range.
    known = {"size": size} if _is_hub(fs) else {}

    def from_file(start: int, stop: int, put: Put) -> None:
        with fs.open(inner, "rb", cache_type="none", **known) as opened:
            opened.seek(start)
            put(0, opened.read(stop - start))

    return from_file


def is_parallel(fs: Any) -> bool:
    """Whether a file system serves several threads at once."""
    return bool(fs.async_impl) or _is_hub(fs)


def gives_ranges(fs: Any, inner: str, row: Mapping[str, Any]) -> bool:
    """Whether ranges of a file can be read, of which `info` returned `row`. Some servers of HTTP give none."""
    size = row.get("size")
    if not _is_http(fs) or size == 0:
        return True
    if size is None:
        return False
    try:
        retrying(lambda: ranges(fs, inner, size, "")(size - 1, size, lambda at, data: None))
    except NoRangesError:
        return False
    return True


def whole(fs: Any, inner: str, put: Put) -> None:
    """Read a file of a server of HTTP from beginning to end. A retry passes all bytes to `put` again."""
    retrying(lambda: run(fs, _from_http(fs, inner, None, "", 0, None, put)))


def run(fs: Any, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` in the thread of an asynchronous file system, and return its result."""
    from fsspec.asyn import sync

    made: T = sync(fs.loop, lambda: coroutine)
    return made


# Called with a sentence about each long wait, from a thread of fsspec's.
on_wait: Callable[[str], None] = lambda text: None  # noqa: E731


class _Watch:
    """Waits for a server in this task: raises HungError in it once nothing has come for `PATIENCE` seconds, counted
    anew from each call of `came`."""

    def __init__(self, inner: str) -> None:
        import asyncio

        self._inner, self._cancelled = inner, asyncio.CancelledError
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._is_told = self._is_hung = False

    def __enter__(self) -> _Watch:
        self.came()
        self._look()
        return self

    def came(self) -> None:
        self._since, self._is_told = self._loop.time(), False

    def _look(self) -> None:
        """Look how long nothing has come, and again when it may have been too long."""
        waited = self._loop.time() - self._since
        if waited >= PATIENCE:
            self._is_hung = True
            assert self._task is not None
            self._task.cancel()
            return
        if waited >= NOTICE and not self._is_told:
            self._is_told = True
            on_wait(f"Waiting for {self._inner}: nothing came from its server for {NOTICE:g} seconds.")
        until = PATIENCE if self._is_told else min(NOTICE, PATIENCE)
        self._timer = self._loop.call_later(until - waited, self._look)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._is_hung and kind is self._cancelled:
            raise HungError(f"nothing came from its server for {PATIENCE:g} seconds") from None


async def _soon(waited: Awaitable[T], inner: str) -> T:
    """Return the result of `waited`. Raises HungError if it takes longer than `PATIENCE` seconds."""
    with _Watch(inner):
        return await waited


def _check_range(told: str, start: int, stop: int, size: int | None) -> None:
    """Raise an error unless `told`, the range that an answer says it is, is bytes `start` to `stop` of `size`."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", told.strip())
    if found is None or (int(found[1]), int(found[2])) != (start, stop - 1):
        what = f"{told[:80]!r}" if told else "no range"
        raise WrongAnswerError(f"its server says that it gives {what}, where bytes {start}-{stop - 1} were requested")
    if size is not None and found[3] not in ("*", str(size)):
        raise ChangedError(f"it has {found[3]} bytes now, and had {size}")


def _check_version(told: str | None, version: str) -> None:
    """Raise ChangedError if `told`, an answer's ETag, is that of another version."""
    if told and version.startswith(('"', "W/")) and told.removeprefix("W/") != version.removeprefix("W/"):
        raise ChangedError("it is another version now")


async def s3_client(
    fs: Any, bucket: str, operation: str, own: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, dict[str, Any]]:
    """Return botocore's client of a file system on S3, which does not retry as s3fs does, and the settings for an
    operation such as "GetObject": those of the file system and `own`, if the operation takes them."""
    await fs.set_session()
    client = await fs.get_s3(bucket)
    taken = client.meta.service_model.operation_model(operation).input_shape.members
    settings = {**fs.s3_additional_kwargs, **fs.req_kw, **own}
    return client, {name: value for name, value in settings.items() if name in taken and value is not None}


async def _from_s3(fs: Any, inner: str, size: int, version: str, start: int, stop: int, put: Put) -> None:
    from s3fs.errors import translate_boto_error

    from ckptconv.storage.object_checksums import of_s3

    bucket, key, chosen = fs.split_path(inner)
    whole = stop - start == size
    settings = {
        **({"VersionId": chosen} if chosen else {}),
        **({"IfMatch": version} if version.startswith('"') else {}),
        **({"ChecksumMode": "ENABLED"} if whole else {"Range": f"bytes={start}-{stop - 1}"}),
    }
    client, known = await _soon(s3_client(fs, bucket, "GetObject", settings), inner)
    try:
        answer = await _soon(client.get_object(Bucket=bucket, Key=key, **known), inner)
    except Exception as error:
        if _status(error) == 412:
            raise ChangedError("it is another version now") from error
        told = translate_boto_error(error)
        raise told from told.__cause__
    try:
        _check_version(answer.get("ETag"), version)
        if not whole:
            _check_range(answer.get("ContentRange") or "", start, stop, size)
        checksums = of_s3(answer, bucket) if whole else ()
        await _pass_on(answer["Body"].read, stop - start, put, inner, checksums)
    finally:
        # Else the connection stays in use, and there are only ten.
        answer["Body"].close()


def azure_settings(fs: Any) -> dict[str, Any]:
    """Return the settings of a request to Azure: the timeouts of `fs`, and no retries but ours.

    Azure's package waits 15 seconds and more before each of its own.
    """
    told = {name: fs.storage_options.get(name) for name in ("timeout", "connection_timeout", "read_timeout")}
    return {**{name: value for name, value in told.items() if value is not None}, "retry_total": 0}


async def with_blob(fs: Any, inner: str, action: Callable[[Any], Awaitable[T]]) -> T:
    """Call `action` with a client of Azure's package for the blob at a path, and return its result.

    Raises FileNotFoundError if the blob, or its container, does not exist.
    """
    container, name, _ = fs.split_path(inner)
    try:
        async with fs.service_client.get_blob_client(container=container, blob=name) as blob:
            return await action(blob)
    except Exception as error:
        if _status(error) == 404:
            raise FileNotFoundError(inner) from error
        raise


async def _from_azure(fs: Any, inner: str, version: str, start: int, stop: int, put: Put) -> None:
    from azure.core import MatchConditions

    settings = azure_settings(fs)
    if version.startswith('"'):
        settings |= {"etag": version, "match_condition": MatchConditions.IfNotModified}

    async def read(blob: Any) -> bytes:
        stream = await blob.download_blob(start, stop - start, version_id=fs.split_path(inner)[2], **settings)
        data: bytes = await stream.readall()
        return data

    try:
        data = await with_blob(fs, inner, read)
    except Exception as error:
        if _status(error) == 412:
            raise ChangedError("it is another version now") from error
        raise
    if len(data) != stop - start:
        raise ShortReadError(f"{len(data)} bytes arrived, where {stop - start} were requested")
    put(0, data)


async def _from_http(
    fs: Any, inner: str, size: int | None, version: str, start: int, stop: int | None, put: Put
) -> None:
    from ckptconv.storage.object_checksums import of_headers

    settings = dict(fs.kwargs)
    # Request the file as it is, not compressed for the transfer.
    headers = {"Accept-Encoding": "identity", **settings.pop("headers", {})}
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    if "timeout" not in {*settings, *fs.client_kwargs}:
        import aiohttp

        # aiohttp's default limits the time of a whole answer, even while bytes keep coming.
        settings["timeout"] = aiohttp.ClientTimeout(total=None)
    session = await fs.set_session()
    answer = await _soon(session.get(fs.encode_url(inner), headers=headers, **settings), inner)
    async with answer:
        if answer.status == 404:
            raise FileNotFoundError(inner)
        answer.raise_for_status()
        _check_version(answer.headers.get("ETag"), version)
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding not in ("", "identity"):
            raise WrongAnswerError(f"its server sends it compressed ({encoding[:40]}), which was not requested")
        length = answer.content_length if stop is None else stop - start
        if stop is not None and answer.status != 206 and (start or answer.content_length != length):
            raise NoRangesError("its server gives whole files only, and no ranges of them")
        if answer.status == 206:
            _check_range(answer.headers.get("Content-Range", ""), start, stop or 0, size)
        # Checksums are those of the whole file.
        checksums = of_headers(answer.headers) if stop is None or length == size else ()
        await _pass_on(answer.content.read, length, put, inner, checksums)


async def _pass_on(
    read: Callable[[int], Awaitable[bytes]],
    length: int | None,
    put: Put,
    inner: str,
    checksums: Iterable[tuple[str, bytes]] = (),
) -> None:
    from ckptconv.storage.object_checksums import Check

    done = 0
    check = Check(checksums, length or 0)
    # One timer for all pieces: there are many, and most come at once.
    with _Watch(inner) as watch:
        while data := await read(CHUNK):
            watch.came()
            if length is not None and done + len(data) > length:
                raise ShortReadError(f"more arrived than the {length} bytes that were requested")
            put(done, data)
            check.update(data)
            done += len(data)
    if length is not None and done != length:
        raise ShortReadError(f"{done} bytes arrived, where {length} were requested")
    if check.wrong:
        raise WrongAnswerError(f"what arrived does not have the checksum ({check.wrong}) that its server states")
