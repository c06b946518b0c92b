"""Compare the checksums that a server gives for an object with the bytes that it sent."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ckptconv.features.compressed.crc32c import crc32c, fastest_crc32c, reflected
from ckptconv.storage.crc import crc32

# Longer objects are not checked with algorithms that run in Python itself, at some 10 MB a second.
SLOW_MOST = 4 << 20
# The reversed polynomial of CRC-64/NVME, and its initial value.
_NVME, _ONES = 0x9A6C9329AC4BC9B5, (1 << 64) - 1


class _Sum(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A CRC of 32 bits, by the function that continues it."""

    def __init__(self, continued: Callable[[bytes, int], int]) -> None:
        self._continued, self._crc = continued, 0

    def update(self, data: bytes) -> None:
        self._crc = self._continued(data, self._crc)

    def digest(self) -> bytes:
        return self._crc.to_bytes(4, "big")


class _Crc64:
    """CRC-64/NVME: reflected; initial value and final XOR are all ones."""

    def __init__(self) -> None:
        self._crc = _ONES

    def update(self, data: bytes) -> None:
        self._crc = reflected(data, self._crc, _NVME)

    def digest(self) -> bytes:
        return (self._crc ^ _ONES).to_bytes(8, "big")


_QUICK: dict[str, Callable[[], _Sum]] = {
    "crc32": functools.partial(_Crc, crc32),
    "md5": functools.partial(hashlib.md5, usedforsecurity=False),
    "sha1": functools.partial(hashlib.sha1, usedforsecurity=False),
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
}
_SLOW: dict[str, Callable[[], _Sum]] = {
    "crc32c": functools.partial(_Crc, crc32c),
    "crc64nvme": _Crc64,
}


class Check:
    """Compares bytes with the `stated` checksums, (algorithm, digest), of an object of `size` bytes. Leaves out
    algorithms that are unknown, or too slow for the size."""

    def __init__(self, stated: Iterable[tuple[str, bytes]], size: int) -> None:
        known = {**_QUICK, **(_SLOW if size <= SLOW_MOST else {})}
        if fastest_crc32c():
            known["crc32c"] = _SLOW["crc32c"]
        self._sums = [(name, digest, known[name]()) for name, digest in stated if name in known]

    def update(self, data: bytes) -> None:
        """Add the next bytes."""
        for _, _, summed in self._sums:
            summed.update(data)

    @property
    def wrong(self) -> str:
        """The first algorithm whose checksum the bytes do not match; "" if they match all."""
        return next((name for name, digest, summed in self._sums if summed.digest() != digest), "")


def stated(algorithm: str, value: str) -> Iterator[tuple[str, bytes]]:
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
