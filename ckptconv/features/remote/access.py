"""Remote files, through fsspec: file systems, listings, ranged reads, and retries.

Nothing is cached that could be stale: listings are requested anew, and no data is kept. The caller chooses the ranges;
fsspec's own caches, which prefetch or fetch whole files, are not used. No server is trusted: its answer has to say that
it is the requested range and version, and a file that is read whole has to match the checksums that the server gives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ckptconv.errors import CkptconvError, FailedError, MissingError, UsageError
from ckptconv.features.remote import stores
from ckptconv.features.remote.stores import Options, Put, Ranges
from ckptconv.text import install

T = TypeVar("T")

# Seconds to wait before each retry, about: each is multiplied by a random factor, so that clients do not retry in step.
WAITS = (0.2, 0.6, 1.8, 5.4, 10.0)
# After how many waits in vain for a server there are no more retries.
HANGS = 2
# Seconds after which a server that cannot be connected to is not tried again: clients of stores retry themselves.
PATIENCE = 5.0

# Keys of a file's info that identify its version, for all file systems: the first that is present counts.
_STAMPS = (
    "ETag", "etag", "generation", "md5Hash", "blob_id", "md5", "LastModified", "last_modified", "Last-Modified",
    "updated", "mtime", "modificationTime", "created",
)  # fmt: skip
# The keys among them whose values are times.
_TIMES = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modificationTime", "created")
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
# Those for connections that were not made: of the standard library, botocore, aiohttp, azure, httpx.
_UNREACHED = {
    "ConnectionRefusedError", "EndpointConnectionError", "ClientConnectorError", "ServiceRequestError", "ConnectError",
}  # fmt: skip
# Errors of the operating system, also as fsspec raises them, for a connection or server that may be back soon.
_PASSING_ERRNOS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH,
    errno.ENETRESET, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_LASTING_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
# Of classes of file systems that serve one thread at a time.
_locks: dict[Any, threading.RLock] = {}
os.register_at_fork(after_in_child=_locks.clear)


class ShortReadError(OSError):
    """A server gave fewer or more bytes than were requested."""


class WrongAnswerError(OSError):
    """A server gave something other than was requested, or than it says it gives."""


class HungError(OSError):
    """A server sent nothing for a long time."""


class ChangedError(OSError):
    """The file is no longer the version that was opened."""


class RefusedError(OSError):
    """A store refuses, and will again. The message gives the reason, `hint` the advice."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


# The transient ones of these.
_OURS = (ShortReadError, WrongAnswerError, HungError)


class NoRangesError(OSError):
    """A server gives whole files only."""


def filesystem(url: str, options: Options | None = None) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path inside it. Raises UsageError if there is none."""
    import fsspec

    for link in url.split("::"):
        bucket = stores.at(link).bucket
        scheme, _, path = link.partition("://")
        if bucket and not path.partition("/")[0]:
            raise UsageError(f"{url} specifies no {bucket}.", f"Add its name after {scheme}://.")
    try:
        with _alone(fsspec.get_filesystem_class(re.split("::|://", url, maxsplit=1)[0])):  # it may read an archive
            fs, inner = fsspec.core.url_to_fs(url, **(options or {}))
    except ImportError as error:
        raise UsageError(f"{url} requires a package that is not installed: {error}.", _extra(url)) from error
    except CkptconvError:  # of the file system of this package, which opens a checkpoint
        raise
    except FileNotFoundError as error:
        raise MissingError(f"{url} cannot be opened: {error} does not exist.") from error
    except (ValueError, TypeError, KeyError) as error:
        last = url.rpartition("::")[2]
        is_name = last != url and str(error).endswith(f"not known: {last}")
        advice = f"For a local file of that name, use ./{last}" if is_name else "See --storage-options."
        if url.startswith(("gzip://", "gz://", "bz2://", "xz://", "zstd://")):
            advice = "Unpack it first, or pipe it: zcat FILE | ckptconv convert - OUTPUT"
        raise UsageError(f"{url} cannot be opened: {error}.", advice) from error
    except Exception as error:  # of a package that the protocol needs
        raise FailedError(f"{url} cannot be opened: {why(error)}.", hint(error)) from error
    return fs, inner


def _extra(url: str) -> str:
    extra = stores.at(url.rpartition("::")[2]).extra
    return install(extra) if extra else ""


def why(error: BaseException) -> str:
    """Return the reason of an error, in one line."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if status(error) == 501 or (isinstance(error, OSError) and error.errno == errno.ENOSYS):
        return "the server does not support this request"
    text = " ".join(str(error).split())
    if isinstance(error, PermissionError):
        return f"permission denied ({text})" if text else "permission denied"
    if isinstance(error, OSError) and error.strerror:
        return " ".join(error.strerror.lower().split())
    if isinstance(error, (*_OURS, ChangedError, NoRangesError, RefusedError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def hint(error: BaseException) -> str:
    """Return advice about an error for the user; "" if nothing is known to help."""
    if isinstance(error, RefusedError):
        return error.hint
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or status(error) in (401, 403):
        return (
            "Check the credentials and their permissions: in the environment, in fsspec's configuration, or in "
            "--storage-options."
        )
    if isinstance(error, EOFError) or str(error) == "unexpected end of data":  # gzip's, and tarfile's
        return "The archive is incomplete: copy it again."
    if type(error).__name__ == "ReadError":  # tarfile's
        return "If the archive is compressed, its name must end in .tar.gz, .tar.bz2 or .tar.xz."
    if is_transient(error):
        return "Several attempts failed. Try again later."
    return ""


# ---------------------------------------------------------------------------------------------------- trying again


def retrying(action: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Return the result of `action`. Retry it after transient errors, with ever longer waits, until `stop` is set."""
    stop = stop or threading.Event()
    hangs, begun = 0, time.monotonic()
    for wait in WAITS:
        try:
            return action()
        except Exception as error:
            hangs += isinstance(error, HungError)
            if not is_transient(error) or hangs == HANGS:
                raise
            if time.monotonic() - begun + wait > PATIENCE and _is_unreached(error):
                raise
            import random  # it takes long to import, and is rarely needed

            if stop.wait(wait * random.uniform(0.5, 1.5)):
                raise
    return action()


def _is_unreached(error: BaseException) -> bool:
    """Return whether no connection to a server was made."""
    return any(kind.__name__ in _UNREACHED for cause in causes(error) for kind in type(cause).__mro__)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may work: after a broken connection, a timeout, or for a busy server."""
    if isinstance(error, (CkptconvError, ChangedError, NoRangesError, RefusedError)):
        return False
    # This comes before the status, because aiohttp gives a broken connection a status that no server sent.
    if isinstance(error, _OURS) or any(kind.__name__ in _BROKEN for kind in type(error).__mro__):
        return True
    code = status(error)
    if code:
        return code in _PASSING or (code >= 500 and code not in _LASTING)
    if isinstance(error, _LASTING_ERRORS):
        # A file system may report a file as missing if it cannot look at it.
        return error.__cause__ is not None and is_transient(error.__cause__)
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


def status(error: BaseException) -> int:
    """Return the status of HTTP that an error, or one of its causes, reports; 0 if none does."""
    for cause in causes(error):
        for name in ("status", "status_code", "code"):
            value = getattr(cause, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping):
            value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(value, int):
                return value
    return 0


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that caused it."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__


# --------------------------------------------------------------------------------------------- entries and listings


def info(fs: Any, inner: str) -> dict[str, Any] | None:
    """Return fsspec's info of a path, requested anew; None if nothing is there."""
    _refresh(fs, inner)
    try:
        facts: dict[str, Any] = retrying(lambda: _asked(fs, "info", inner))
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_transient(error) or status(error) in (401, 403):
            raise error.__cause__ or error from None
        return None
    return facts


def names(fs: Any, inner: str) -> list[dict[str, Any]]:
    """List a directory, requested anew. Each entry is as `info` returns it."""
    _refresh(fs, inner)
    return list(retrying(lambda: _asked(fs, "ls", inner, detail=True)))


def _asked(fs: Any, method: str, inner: str, **settings: Any) -> Any:
    with _alone(type(fs)):
        return stores.of(fs).call(fs, method, inner, **settings)


def _refresh(fs: Any, inner: str) -> None:
    """Drop the listings that a file system caches, unless they can never change."""
    if not stores.of(fs).fixed(inner):
        fs.invalidate_cache()


def stamp(row: Mapping[str, Any]) -> str:
    """Return the value that identifies this version of a file; "" if its file system has none."""
    value = next((row[key] for key in _STAMPS if row.get(key)), "")
    # Some file systems give a time in one form in a listing, and in another for a single file.
    seconds = value.timestamp() if hasattr(value, "timestamp") else value
    return f"{seconds:f}" if isinstance(seconds, float) else str(seconds)


def time_of(row: Mapping[str, Any]) -> float | None:
    """Return when a file changed last, in seconds since 1970; None if its file system does not say, or as text that is
    no time."""
    value: Any = next((row[key] for key in _TIMES if row.get(key)), None)
    if isinstance(value, str):
        from datetime import datetime

        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    if hasattr(value, "timestamp"):
        return float(value.timestamp())
    return float(value) if isinstance(value, (int, float)) else None


# ----------------------------------------------------------------------------------------------------------- ranges


def ranges(fs: Any, inner: str, size: int, version: str) -> Ranges:
    """Return a function that reads ranges of a file of `size` bytes, and that several threads may call.

    It reads the version that `stamp` returned, if the store can, and raises ChangedError once there is another. It
    raises NoRangesError if the server gives whole files only, WrongAnswerError if it gives anything but the requested
    range, and HungError if it sends nothing.
    """
    store_ranges = stores.of(fs).ranges
    if store_ranges:
        return store_ranges(fs, inner, size, version)
    if type(fs).async_impl:
        return lambda start, stop, put: put(0, fs.cat_file(inner, start=start, end=stop))
    # A file system that caches the files of another, its `fs`, chooses how.
    read = from_file(fs, inner, **({} if hasattr(fs, "fs") else {"cache_type": "none"}))

    def read_alone(start: int, stop: int, put: Put) -> None:
        with _alone(type(fs)):
            read(start, stop, put)

    return read_alone


def from_file(fs: Any, inner: str, **settings: Any) -> Ranges:
    """Return a function that reads ranges of a file that the file system opens, with its `settings`."""

    def read(start: int, stop: int, put: Put) -> None:
        with fs.open(inner, "rb", **settings) as opened:
            opened.seek(start)
            put(0, opened.read(stop - start))

    return read


def is_parallel(fs: Any) -> bool:
    """Return whether a file system serves several threads at once."""
    return _serves_threads(type(fs))


def _serves_threads(kind: Any) -> bool:
    # Of a file system that caches files of an asynchronous one, only the class says that it is not asynchronous.
    return bool(kind.async_impl) or stores.of(kind).parallel


def _alone(kind: Any) -> AbstractContextManager[object]:
    """Return a context in which no other thread uses file systems of the class `kind`, unless they support that.

    The open files of an archive share one handle, which each read moves; so do those of one file in memory. The files
    of an FTP server share one connection, and two threads download one file over each other into a cache.
    """
    # One that reads with threads of its own, as that of this package does, would wait for itself.
    if _serves_threads(kind) or getattr(kind, "reads_with_threads", False):
        return contextlib.nullcontext()
    return _locks.setdefault(kind, threading.RLock())


def run(fs: Any, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` in the thread of an asynchronous file system, and return its result."""
    from fsspec.asyn import sync

    result: T = sync(fs.loop, lambda: coroutine)
    return result
