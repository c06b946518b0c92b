"""Compare the checksums that a server gives for an object with the bytes that it sent."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ckptconv.storage.crc import crc32

# Longer objects are not checked with algorithms that run in Python itself, at some 10 MB a second.
SLOW_MOST = 4 << 20


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
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        table.append(value)
    return tuple(table)


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

    def __init__(self, stated: Iterable[tuple[str, bytes]], size: int) -> None:
        known = {**_QUICK, **(_SLOW if size <= SLOW_MOST else {})}
        self._sums = [(name, digest, known[name]()) for name, digest in stated if name in known]

    def update(self, data: bytes) -> None:
        """Add the next bytes."""
        for _, _, summed in self._sums:
            summed.update(data)

    @property
    def wrong(self) -> str:
        """The first algorithm whose checksum the bytes do not match; "" if they match all."""
        return next((name for name, digest, summed in self._sums if summed.digest() != digest), "")


def told(algorithm: str, value: str) -> Iterator[tuple[str, bytes]]:
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
