"""Files that are reached through fsspec: its file systems, what stands in them, ranged reads, and trying again.

Nothing is kept between calls that could be stale: listings are asked for anew, and no data is cached. Ranges are chosen
by whoever reads; fsspec's own caches, which read ahead or fetch whole files, are left out. A server is not believed:
its answer has to say that it is the range, and the version, that was asked for, and what is read whole has to have the
checksums that it tells.
"""

from __future__ import annotations

import datetime
import errno
import random
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ckptconv.errors import CkptconvError, UsageError
from ckptconv.storage.object_checksums import Check, of_headers, of_s3

Options = Mapping[str, Any]
T = TypeVar("T")

# What is taken from a connection at a time.
CHUNK = 1 << 17

# Seconds to wait before each further attempt, about: they are spread at random, so that many do not come at once.
WAITS = (0.2, 0.6, 1.8, 5.4, 10.0)
# Seconds without a byte after which a wait is told of, and after which it is given up; and how many of these there may
# be before no more is asked for.
NOTICE, PATIENCE, HANGS = 10.0, 60.0, 2

# What identifies a version of a file, by file system: the first of these that it tells.
_STAMPS = (
    "ETag", "etag", "generation", "md5Hash", "blob_id", "md5", "LastModified", "last_modified", "Last-Modified",
    "updated", "mtime", "modificationTime", "created",
)  # fmt: skip
# Statuses of HTTP below 500 that pass: timeout, too early, too many requests. And one above that does not.
_PASSING, _LASTING = (408, 425, 429), (501, 505)
# Names of errors, among those that an error descends from, of links that broke: of the standard library, aiohttp,
# botocore, requests, azure, google. By name, as none of these is imported here.
_BROKEN = {
    "TimeoutError", "ConnectionError", "IncompleteReadError", "IncompleteRead", "HTTPException", "ClientPayloadError",
    "ClientConnectionError", "HTTPClientError", "ResponseParserError", "ReadTimeout", "ChunkedEncodingError",
    "ServiceRequestError", "ServiceResponseError", "IncompleteReadException", "TransportError", "SSLError",
    "ProtocolError", "FlexibleChecksumError",
}  # fmt: skip
# What the operating system, or a file system in its terms, says of a link or server that may be back soon.
_PASSING_ERRNOS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH,
    errno.ENETRESET, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_LASTING_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


class ShortReadError(OSError):
    """A server gave fewer or more bytes than it was asked for."""


class WrongAnswerError(OSError):
    """A server gave something else than it was asked for, or than it says it has."""


class HungError(OSError):
    """Nothing came from a server for a long time."""


class ChangedError(OSError):
    """What is read is not what it was when it was opened."""


# Those that may pass.
_OURS = (ShortReadError, WrongAnswerError, HungError)


class NoRangesError(OSError):
    """A server gives whole files only."""


def filesystem(url: str, options: Options | None = None) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path inside it. Raises UsageError where there is none."""
    import fsspec

    try:
        fs, inner = fsspec.core.url_to_fs(url, **(options or {}))
    except ImportError as error:
        raise UsageError(f"{url} needs a package that is not installed: {error}.", _extra(url)) from error
    except FileNotFoundError as error:
        raise UsageError(f"{url} cannot be opened: {error} does not exist.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{url} cannot be opened: {error}.", "See --storage-options.") from error
    return fs, inner


def protocols(fs: Any) -> tuple[str, ...]:
    """The names that a file system goes by in URLs."""
    named = fs.protocol
    return (named,) if isinstance(named, str) else tuple(named)


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


def _extra(url: str) -> str:
    extra = _EXTRAS.get(url.rpartition("::")[2].partition("://")[0])
    return f"Install ckptconv[{extra}]." if extra else ""


def why(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    text = " ".join(str(error).split())
    if isinstance(error, PermissionError):
        return f"permission denied ({text})" if text else "permission denied"
    if isinstance(error, OSError) and error.strerror:
        return " ".join(error.strerror.lower().split())
    if isinstance(error, (*_OURS, ChangedError, NoRangesError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def hint(error: BaseException) -> str:
    """What a user may do about an error; "" if nothing comes to mind."""
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or _status(error) in (401, 403):
        return "Check the credentials, and what they may do: the environment's, fsspec's, or --storage-options."
    if is_transient(error):
        return "It was tried several times: try it again later."
    return ""


# ---------------------------------------------------------------------------------------------------- trying again


def retrying(action: Callable[[], T], stop: threading.Event | None = None) -> T:
    """What `action` gives, which is tried again, after a while and then a longer while, where its failure may pass.

    Once `stop` is set, it is not.
    """
    stop = stop or threading.Event()
    hangs = 0
    for wait in WAITS:
        try:
            return action()
        except Exception as error:
            hangs += isinstance(error, HungError)
            if not is_transient(error) or hangs == HANGS:
                raise
            if stop.wait(wait * random.uniform(0.5, 1.5)):
                raise
    return action()


def is_transient(error: BaseException) -> bool:
    """Whether what failed may work when it is tried again: broken links, timeouts, busy servers."""
    if isinstance(error, (CkptconvError, ChangedError, NoRangesError)):
        return False
    # Before the status: aiohttp gives one to what broke off, which no server sent.
    if isinstance(error, _OURS) or any(kind.__name__ in _BROKEN for kind in type(error).__mro__):
        return True
    status = _status(error)
    if status:
        return status in _PASSING or (status >= 500 and status not in _LASTING)
    if isinstance(error, _LASTING_ERRORS):
        # A file system may call missing whatever it cannot look at.
        return error.__cause__ is not None and is_transient(error.__cause__)
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


def _status(error: BaseException) -> int:
    """The status of HTTP that an error, or what caused it, reports; 0 if none does."""
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
    """What a file system says of a path, asked anew; None where nothing stands there."""
    if inner.endswith("/") and _is_http(fs):
        return {"type": "directory"}  # where there is a listing, it is a page of links
    fs.invalidate_cache()
    try:
        found: dict[str, Any] = retrying(lambda: _asked(fs, "info", inner))
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_transient(error) or _status(error) in (401, 403):
            raise error.__cause__ or error from None
        return None
    return found


def names(fs: Any, inner: str) -> list[dict[str, Any]]:
    """What stands in a directory, asked anew, as `info` describes it."""
    fs.invalidate_cache()
    rows: list[dict[str, Any]] = retrying(lambda: _asked(fs, "ls", inner, detail=True))
    if _is_http(fs):
        # Links may lead anywhere, and be of other ways to show the same page.
        return [
            row
            for row in rows
            if row["name"].rstrip("/").rpartition("/")[0] == inner.rstrip("/") and not re.search("[?#]", row["name"])
        ]
    return rows


def _asked(fs: Any, what: str, inner: str, **settings: Any) -> Any:
    """What `fs` says of a path, asked by its method `what`; waited for as long as for any answer, where that can be."""
    if _is_http(fs) or _is_s3(fs):
        return run(fs, _soon(getattr(fs, f"_{what}")(inner, **settings), inner))
    return getattr(fs, what)(inner, **settings)


def _is_http(fs: Any) -> bool:
    return bool({"http", "https"} & set(protocols(fs)))


def _is_s3(fs: Any) -> bool:
    return bool({"s3", "s3a"} & set(protocols(fs)))


def stamp(row: Mapping[str, Any]) -> str:
    """What tells this version of a file from others, as far as its file system says; "" if it does not."""
    value = next((row[key] for key in _STAMPS if row.get(key)), "")
    # Some tell a time in one way when they list a directory, and in another when they are asked for a file.
    seconds = value.timestamp() if isinstance(value, datetime.datetime) else value
    return f"{seconds:f}" if isinstance(seconds, float) else str(seconds)


# ----------------------------------------------------------------------------------------------------------- ranges

# Takes bytes that came, and how many came before them.
Put = Callable[[int, bytes], None]
# Reads bytes `start` to `stop` of a file with one request, and hands them on as they come.
Ranges = Callable[[int, int, Put], None]


def ranges(fs: Any, inner: str, size: int, version: str) -> Ranges:
    """A function that reads ranges of a file, for several threads.

    Where the store can, it reads the version that `stamp` told, and raises ChangedError once there is another. A
    server that gives whole files only is a NoRangesError, one that gives something else than a range that was asked for
    a WrongAnswerError, one that gives nothing a HungError. `size` is the file's, in bytes.
    """
    if _is_http(fs):
        return lambda start, stop, put: run(fs, _from_http(fs, inner, size, version, start, stop, put))
    if _is_s3(fs):
        return lambda start, stop, put: run(fs, _from_s3(fs, inner, size, version, start, stop, put))
    if {"abfs", "az", "abfss"} & set(protocols(fs)):
        return lambda start, stop, put: run(fs, _from_azure(fs, inner, version, start, stop, put))
    if fs.async_impl:
        return lambda start, stop, put: put(0, fs.cat_file(inner, start=start, end=stop))

    def from_file(start: int, stop: int, put: Put) -> None:
        with fs.open(inner, "rb", cache_type="none") as opened:
            opened.seek(start)
            put(0, opened.read(stop - start))

    return from_file


def is_parallel(fs: Any) -> bool:
    """Whether a file system serves several threads at a time."""
    return bool(fs.async_impl) or "hf" in protocols(fs)


def gives_ranges(fs: Any, inner: str, row: Mapping[str, Any]) -> bool:
    """Whether ranges can be read of the file that `info` described as `row`: of some servers of HTTP, none can."""
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
    """Read a file of a server of HTTP from beginning to end. What was put is put again where it is tried again."""
    retrying(lambda: run(fs, _from_http(fs, inner, None, "", 0, None, put)))


def run(fs: Any, coroutine: Coroutine[Any, Any, T]) -> T:
    """What `coroutine` gives, which runs in the thread of an asynchronous file system."""
    from fsspec.asyn import sync

    made: T = sync(fs.loop, lambda: coroutine)
    return made


# Is told, in a sentence, of waits that take long. From a thread of its own.
on_wait: Callable[[str], None] = lambda text: None  # noqa: E731


async def _soon(waited: Awaitable[T], inner: str) -> T:
    """What `waited` gives. Raises HungError where that takes longer than anyone waits for one answer."""
    import asyncio

    task = asyncio.ensure_future(waited)
    try:
        done, _ = await asyncio.wait({task}, timeout=min(NOTICE, PATIENCE))
        if not done and PATIENCE > NOTICE:
            on_wait(f"Waiting for {inner}: nothing came from its server for {NOTICE:g} seconds.")
            done, _ = await asyncio.wait({task}, timeout=PATIENCE - NOTICE)
        if not done:
            raise HungError(f"nothing came from its server for {PATIENCE:g} seconds")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1)


def _check_range(told: str, start: int, stop: int, size: int | None) -> None:
    """Raise an error unless `told`, the range that an answer says it is, is bytes `start` to `stop` of `size`."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", told.strip())
    if found is None or (int(found[1]), int(found[2])) != (start, stop - 1):
        what = f"{told[:80]!r}" if told else "no range"
        raise WrongAnswerError(f"its server says that it gives {what}, where bytes {start}-{stop - 1} were asked for")
    if size is not None and found[3] not in ("*", str(size)):
        raise ChangedError(f"it has {found[3]} bytes now, and had {size}")


def _check_version(told: str | None, version: str) -> None:
    """Raise ChangedError where `told`, an answer's ETag, is that of another version."""
    if told and version.startswith(('"', "W/")) and told.removeprefix("W/") != version.removeprefix("W/"):
        raise ChangedError("it is another version now")


async def _from_s3(fs: Any, inner: str, size: int, version: str, start: int, stop: int, put: Put) -> None:
    bucket, key, chosen = fs.split_path(inner)
    whole = stop - start == size
    settings = {
        **fs.req_kw,
        **({"VersionId": chosen} if chosen else {}),
        **({"IfMatch": version} if version.startswith('"') else {}),
        **({"ChecksumMode": "ENABLED"} if whole else {"Range": f"bytes={start}-{stop - 1}"}),
    }
    try:
        answer = await _soon(fs._call_s3("get_object", Bucket=bucket, Key=key, **settings), inner)
    except OSError as error:
        if _status(error) == 412:
            raise ChangedError("it is another version now") from error
        raise
    try:
        _check_version(answer.get("ETag"), version)
        if not whole:
            _check_range(answer.get("ContentRange") or "", start, stop, size)
        checksums = of_s3(answer, bucket) if whole else ()
        await _pass_on(answer["Body"].read, stop - start, put, inner, checksums)
    finally:
        # Else the connection stays taken, and there are but ten.
        answer["Body"].close()


def azure_settings(fs: Any) -> dict[str, Any]:
    """What a request to Azure is made with: the timeouts of `fs`, and no attempts but ours.

    The package waits 15 seconds and more before each of its own.
    """
    told = {name: fs.storage_options.get(name) for name in ("timeout", "connection_timeout", "read_timeout")}
    return {**{name: value for name, value in told.items() if value is not None}, "retry_total": 0}


async def with_blob(fs: Any, inner: str, action: Callable[[Any], Awaitable[T]]) -> T:
    """What `action` gives, which is called with a client of Azure's package for the blob at a path.

    Raises FileNotFoundError where the blob, or its container, is not there.
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
        raise ShortReadError(f"{len(data)} bytes came, where {stop - start} were asked for")
    put(0, data)


async def _from_http(
    fs: Any, inner: str, size: int | None, version: str, start: int, stop: int | None, put: Put
) -> None:
    settings = dict(fs.kwargs)
    # What is asked for is the file as it is, and not what it is compressed to on its way.
    headers = {"Accept-Encoding": "identity", **settings.pop("headers", {})}
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    if "timeout" not in {*settings, *fs.client_kwargs}:
        import aiohttp

        # Its own is for all of an answer, however much of it comes all the time.
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
            raise WrongAnswerError(f"its server sends it compressed ({encoding[:40]}), which was not asked for")
        length = answer.content_length if stop is None else stop - start
        if stop is not None and answer.status != 206 and (start or answer.content_length != length):
            raise NoRangesError("its server gives whole files only, and no ranges of them")
        if answer.status == 206:
            _check_range(answer.headers.get("Content-Range", ""), start, stop or 0, size)
        # A checksum is that of the whole file.
        checksums = of_headers(answer.headers) if stop is None or length == size else ()
        await _pass_on(answer.content.read, length, put, inner, checksums)


async def _pass_on(
    read: Callable[[int], Awaitable[bytes]],
    length: int | None,
    put: Put,
    inner: str,
    checksums: Iterable[tuple[str, bytes]] = (),
) -> None:
    done = 0
    check = Check(checksums, length or 0)
    while data := await _soon(read(CHUNK), inner):
        if length is not None and done + len(data) > length:
            raise ShortReadError(f"more came than the {length} bytes that were asked for")
        put(done, data)
        check.update(data)
        done += len(data)
    if length is not None and done != length:
        raise ShortReadError(f"{done} bytes came, where {length} were asked for")
    if check.wrong:
        raise WrongAnswerError(f"what came does not have the checksum ({check.wrong}) that its server tells of it")
