"""Compare the checksums that a server gives for an object with the bytes that it sent.

Sources: Amazon S3's "Checking object integrity", Google Cloud Storage's `x-goog-hash`, Azure's `x-ms-blob-content-md5`,
RFC 1864 (Content-MD5), RFC 3230 (Digest), RFC 9530 (Repr-Digest, Content-Digest).
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ckptconv.storage.crc import crc32

# Longer objects are not checked with algorithms that run in Python itself, at some 10 MB a second.
SLOW_MOST = 4 << 20
_AMAZON = "x-amz-checksum-"
# Headers with the MD5 of a whole object, and headers with lists of digests by algorithm.
_MD5 = ("content-md5", "x-ms-blob-content-md5")
_LISTS = ("x-goog-hash", "digest", "repr-digest", "content-digest")
_LISTED = re.compile(r"([A-Za-z0-9-]+)=:?([A-Za-z0-9+/=]+):?")
_PLAIN_ETAG = re.compile(r'"([0-9a-f]{32})"')


class _Sum(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes) -> None:
        self._crc = crc32(data, self._crc)

    def digest(self) -> bytes:
        return self._crc.to_bytes(4, "big")


class _Reflected:
    """A reflected CRC of `bits` bits with the reversed `polynomial`; initial value and final XOR are all ones."""

    def __init__(self, polynomial: int, bits: int) -> None:
        self._table, self._bits = _table(polynomial), bits
        self._crc = (1 << bits) - 1

    def update(self, data: bytes) -> None:
        crc, table = self._crc, self._table
        for byte in data:
            crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
        self._crc = crc

    def digest(self) -> bytes:
        return (self._crc ^ ((1 << self._bits) - 1)).to_bytes(self._bits // 8, "big")


@functools.cache
def _table(polynomial: int) -> tuple[int, ...]:
    made = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        made.append(value)
    return tuple(made)


_QUICK: dict[str, Callable[[], _Sum]] = {
    "crc32": _Crc32,
    "md5": functools.partial(hashlib.md5, usedforsecurity=False),
    "sha1": functools.partial(hashlib.sha1, usedforsecurity=False),
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
}
_SLOW: dict[str, Callable[[], _Sum]] = {
    "crc32c": lambda: _Reflected(0x82F63B78, 32),
    "crc64nvme": lambda: _Reflected(0x9A6C9329AC4BC9B5, 64),
}


class Check:
    """Compares bytes with the checksums `told`, (algorithm, digest), of an object of `size` bytes. Leaves out
    algorithms that are unknown, or too slow for the size."""

    def __init__(self, told: Iterable[tuple[str, bytes]], size: int) -> None:
        known = {**_QUICK, **(_SLOW if size <= SLOW_MOST else {})}
        self._sums = [(name, digest, known[name]()) for name, digest in told if name in known]

    def update(self, data: bytes) -> None:
        """Add the next bytes."""
        for _, _, summed in self._sums:
            summed.update(data)

    @property
    def wrong(self) -> str:
        """The first algorithm whose checksum the bytes do not match; "" if they match all."""
        return next((name for name, digest, summed in self._sums if summed.digest() != digest), "")


def of_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield the checksums of a whole object in the headers of an answer, with algorithms in lower case."""
    composite = headers.get(f"{_AMAZON}type", "").upper() == "COMPOSITE"
    for name, value in headers.items():
        name = name.lower()
        if name.startswith(_AMAZON) and not composite:
            yield from _told(name[len(_AMAZON) :], value)
        elif name in _MD5:
            yield from _told("md5", value)
        elif name in _LISTS:
            for algorithm, digest in _LISTED.findall(value):
                yield from _told(algorithm, digest)


def of_s3(answer: Mapping[str, Any], bucket: str) -> Iterator[tuple[str, bytes]]:
    """Yield the checksums of a whole object in S3's answer to GetObject, as botocore returns it."""
    if answer.get("ChecksumType") != "COMPOSITE":
        for name, value in answer.items():
            if name.startswith("Checksum") and name != "ChecksumType":
                yield from _told(name.removeprefix("Checksum"), str(value))
    # The ETag of what was uploaded with one request is its MD5, unless encrypted or in a directory bucket.
    tag = _PLAIN_ETAG.fullmatch(answer.get("ETag", ""))
    plain = answer.get("ServerSideEncryption", "AES256") == "AES256" and "SSECustomerAlgorithm" not in answer
    if tag and plain and not bucket.endswith("--x-s3"):
        yield "md5", bytes.fromhex(tag[1])


def _told(algorithm: str, value: str) -> Iterator[tuple[str, bytes]]:
    """Yield algorithm and digest, if `value` is one in base64, and not, say, a checksum of the checksums of parts."""
    name = re.sub(r"^sha-(?=\d)", "sha", algorithm.lower())
    if name not in _QUICK and name not in _SLOW:
        return
    try:
        digest = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return
    if len(digest) == len(({**_QUICK, **_SLOW})[name]().digest()):
        yield name, digest
