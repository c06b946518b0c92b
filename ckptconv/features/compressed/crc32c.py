"""CRC-32C: by google-crc32c where that is installed, else some hundred times more slowly."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

# The reversed polynomial of CRC-32C.
_CASTAGNOLI = 0x82F63B78


@functools.cache
def fastest_crc32c() -> ModuleType | None:
    """Return the package that computes CRC-32C; None if it is not installed."""
    try:
        return importlib.import_module("google_crc32c")
    except ImportError:
        return None


def crc32c(data: bytes, value: int = 0) -> int:
    """Return the CRC-32C of `data` behind bytes whose CRC-32C is `value`."""
    package = fastest_crc32c()
    if package:
        result: int = package.extend(value, data)
        return result
    return ~reflected(data, ~value & 0xFFFFFFFF, _CASTAGNOLI) & 0xFFFFFFFF


def reflected(data: bytes, crc: int, polynomial: int) -> int:
    """Return the remainder `crc` of a reflected CRC with the reversed `polynomial`, after `data`."""
    table = _table(polynomial)
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc


@functools.cache
def _table(polynomial: int) -> tuple[int, ...]:
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        entries.append(value)
    return tuple(entries)
