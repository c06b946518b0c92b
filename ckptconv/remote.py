"""Files that are reached through fsspec: its file systems, what stands in them, ranged reads, and trying again.

Nothing is kept between calls that could be stale: listings are asked for anew, and no data is cached. Ranges are chosen
by whoever reads; fsspec's own caches, which read ahead or fetch whole files, are left out.
"""

from __future__ import annotations

import datetime
import errno
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from .errors import CkptconvError, UsageError

Options = Mapping[str, Any]
T = TypeVar("T")

# Seconds to wait before each further attempt, about: they are spread at random, so that many do not come at once.
WAITS = (0.2, 0.6, 1.8, 5.4, 10.0)

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
    "ProtocolError",
}  # fmt: skip
# What the operating system, or a file system in its terms, says of a link or server that may be back soon.
_PASSING_ERRNOS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH,
    errno.ENETRESET, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_LASTING_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


class ShortReadError(OSError):
    """A server gave fewer or more bytes than it was asked for."""


class ChangedError(OSError):
    """What is read is not what it was when it was opened."""


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
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---------------------------------------------------------------------------------------------------- trying again


def retrying(action: Callable[[], T]) -> T:
    """What `action` gives, which is tried again, after a while and then a longer while, where its failure may pass."""
    for wait in WAITS:
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(wait * random.uniform(0.5, 1.5))
    return action()


def is_transient(error: BaseException) -> bool:
    """Whether what failed may work when it is tried again: broken links, timeouts, busy servers."""
    if isinstance(error, (CkptconvError, ChangedError, NoRangesError)):
        return False
    status = _status(error)
    if status:
        return status in _PASSING or (status >= 500 and status not in _LASTING)
    if isinstance(error, ShortReadError):
        return True
    if isinstance(error, _LASTING_ERRORS):
        # A file system may call missing whatever it cannot look at.
        return error.__cause__ is not None and is_transient(error.__cause__)
    if any(kind.__name__ in _BROKEN for kind in type(error).__mro__):
        return True
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
    fs.invalidate_cache()
    try:
        found: dict[str, Any] = retrying(lambda: fs.info(inner))
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_transient(error) or _status(error) in (401, 403):
            raise error.__cause__ or error from None
        return None
    return found


def names(fs: Any, inner: str) -> list[dict[str, Any]]:
    """What stands in a directory, asked anew, as `info` describes it."""
    fs.invalidate_cache()
    rows: list[dict[str, Any]] = retrying(lambda: fs.ls(inner, detail=True))
    return rows


def stamp(row: Mapping[str, Any]) -> str:
    """What tells this version of a file from others, as far as its file system says; "" if it does not."""
    value = next((row[key] for key in _STAMPS if row.get(key)), "")
    return f"{value.timestamp():f}" if isinstance(value, datetime.datetime) else str(value)


# ----------------------------------------------------------------------------------------------------------- ranges


def ranges(fs: Any, inner: str, size: int, version: str) -> Callable[[int, int], bytes]:
    """A function that gives bytes `start` to `stop` of a file, for several threads.

    Where the store can, it reads the version that `stamp` told, and raises ChangedError once there is another.
    """
    names = protocols(fs)
    if {"http", "https"} & set(names):
        return _http_ranges(fs, inner, size)
    if "s3" in names and version:
        return _s3_ranges(fs, inner, size, version)
    return lambda start, stop: fs.cat_file(inner, start=start, end=stop)


def _s3_ranges(fs: Any, inner: str, size: int, version: str) -> Callable[[int, int], bytes]:
    # Told the size and the rest, it asks for nothing; If-Match has the server compare the version.
    handle = fs.open(inner, "rb", cache_type="none", size=size)
    handle.details = {"name": inner, "size": size, "ETag": version, "type": "file"}
    if hasattr(handle, "read_kw"):
        handle.read_kw = {**handle.read_kw, "IfMatch": version}

    def fetch(start: int, stop: int) -> bytes:
        try:
            data: bytes = handle._fetch_range(start, stop)
        except OSError as error:
            if type(error).__name__ == "FileExpired" or _status(error) == 412:
                raise ChangedError("it is another version now") from error
            raise
        return data

    return fetch


def _http_ranges(fs: Any, inner: str, size: int) -> Callable[[int, int], bytes]:
    # As a file, it looks at the answer before it takes a whole file for a range.
    handle = fs.open(inner, "rb", block_size=1 << 20, cache_type="none", size=size) if size else None

    def fetch(start: int, stop: int) -> bytes:
        try:
            data: bytes = handle._fetch_range(start, stop) if handle else b""
        except ValueError as error:
            raise NoRangesError("its server gives whole files only, and no ranges of them") from error
        return data

    return fetch
