"""Reads files on servers of HTTP.

Sources of the headers with checksums: Amazon S3's "Checking object integrity", Google Cloud Storage's `x-goog-hash`,
Azure's `x-ms-blob-content-md5`, RFC 1864 (Content-MD5), RFC 3230 (Digest), RFC 9530 (Repr-Digest, Content-Digest).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ckptconv.errors import CkptconvError, FailedError, UsageError
from ckptconv.features.http.answers import call_soon, check_range, check_version, pass_on, soon
from ckptconv.features.http.object_checksums import stated
from ckptconv.features.remote import access, stores
from ckptconv.features.remote.access import NoRangesError, WrongAnswerError, run
from ckptconv.features.remote.stores import Options, Put, Ranges, Store
from ckptconv.features.spool.spool import ELSEWHERE, Spool
from ckptconv.storage.files import hold
from ckptconv.storage.writing import check_space

_AMAZON = "x-amz-checksum-"
# Headers with the MD5 of a whole object, and headers with lists of digests by algorithm.
_MD5 = ("content-md5", "x-ms-blob-content-md5")
_LISTS = ("x-goog-hash", "digest", "repr-digest", "content-digest")
_LISTED = re.compile(r"([A-Za-z0-9-]+)=:?([A-Za-z0-9+/=]+):?")


def _call(fs: Any, method: str, inner: str, **settings: Any) -> Any:
    if method == "info" and (inner.endswith("/") or not urlsplit(inner).path):
        return {"type": "directory"}  # its listing, if any, is a page of links
    answer = call_soon(fs, method, inner, **settings)
    if method == "info":
        return answer
    # Links may lead anywhere, or to other views of the same page.
    place = inner.rstrip("/")
    return [
        row
        for row in answer
        if row["name"].rstrip("/").rpartition("/")[0] == place and not re.search("[?#]", row["name"])
    ]


def _ranges(fs: Any, inner: str, size: int, version: str) -> Ranges:
    return lambda start, stop, put: run(fs, _from_http(fs, inner, size, version, start, stop, put))


async def _from_http(
    fs: Any, inner: str, size: int | None, version: str, start: int, stop: int | None, put: Put
) -> None:
    settings = dict(fs.kwargs)
    # Request the file itself, not compressed for the transfer.
    headers = {"Accept-Encoding": "identity", **settings.pop("headers", {})}
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    if "timeout" not in {*settings, *fs.client_kwargs}:
        import aiohttp

        # aiohttp's default limits the time of a whole answer, even while bytes arrive.
        settings["timeout"] = aiohttp.ClientTimeout(total=None)
    session = await fs.set_session()
    answer = await soon(session.get(fs.encode_url(inner), headers=headers, **settings), inner)
    async with answer:
        if answer.status == 404:
            raise FileNotFoundError(inner)
        answer.raise_for_status()
        check_version(answer.headers.get("ETag"), version)
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding not in ("", "identity"):
            raise WrongAnswerError(
                f"its server sends it compressed ({encoding[:40]}), although no compression was requested"
            )
        length = answer.content_length if stop is None else stop - start
        if stop is not None and answer.status != 206 and (start or answer.content_length != length):
            raise NoRangesError("its server sends only whole files, not ranges")
        if answer.status == 206:
            check_range(answer.headers.get("Content-Range", ""), start, stop or 0, size)
        # Checksums are those of the whole file.
        checksums = of_headers(answer.headers) if stop is None or length == size else ()
        await pass_on(answer.content.read, length, put, inner, checksums)


def of_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield the checksums of a whole object in the headers of an answer, with algorithms in lower case."""
    composite = headers.get(f"{_AMAZON}type", "").upper() == "COMPOSITE"
    for name, value in headers.items():
        name = name.lower()
        if name.startswith(_AMAZON) and not composite:
            yield from stated(name[len(_AMAZON) :], value)
        elif name in _MD5:
            yield from stated("md5", value)
        elif name in _LISTS:
            for algorithm, digest in _LISTED.findall(value):
                yield from stated(algorithm, digest)


def pinned(url: str, options: Options) -> str:
    """Return the URL. Raise UsageError if it is that of a page about content of another store."""
    meant = stores.meant(url)
    if meant:
        raise UsageError(f"{url} is a web page about {meant.kind}.", f"Give {meant.url}.")
    return url


def taken(url: str, options: Options, directory: str = "") -> None:
    """Download the file at `url` to a temporary file if its server only returns whole files; `url` then refers to the
    temporary file.

    Raise FailedError if the download fails or has no room.
    """
    fs, inner = access.filesystem(url, options)
    try:
        row = access.info(fs, inner)
        if row is None or row["type"] == "directory" or _gives_ranges(fs, inner, row):
            return
        spool = Spool(directory)
        check_space(spool.directory, row.get("size") or 0, f"The file at {url}", ELSEWHERE)
        # A retry writes all bytes again.
        access.retrying(lambda: run(fs, _from_http(fs, inner, None, "", 0, None, spool.write_at)))
    except CkptconvError:
        raise
    except Exception as error:
        raise FailedError(f"{url} cannot be read: {access.why(error)}.", access.hint(error)) from error
    hold(url, spool.descriptor)


def _gives_ranges(fs: Any, inner: str, row: Mapping[str, Any]) -> bool:
    """Return whether the server returns ranges of a file; `row` is the result of `info` for it."""
    size = row.get("size")
    if size == 0:
        return True
    if size is None:
        return False
    try:
        access.retrying(lambda: _ranges(fs, inner, size, "")(size - 1, size, lambda at, data: None))
    except NoRangesError:
        return False
    return True


def meant(text: str) -> stores.Meant | None:
    """Return the URL of HTTP that is meant by an address without its scheme, as in 127.0.0.1:8000/model.pt."""
    is_address = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}/\S*", text)
    return stores.Meant("the address of a server", f"http://{text}") if is_address else None


STORE = Store(
    extra="http",
    meant=meant,
    call=_call,
    ranges=_ranges,
    pinned=pinned,
    taken=taken,
    instead="Plain HTTP servers accept no uploads: use another OUTPUT, such as model.safetensors.",
)
