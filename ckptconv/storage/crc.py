"""CRC-32 and Adler-32: by zlib-ng where its package is installed, which is some four and fifteen times as fast."""

from __future__ import annotations

import functools
import importlib
import zlib
from types import ModuleType


@functools.cache
def fastest() -> ModuleType:
    try:
        return importlib.import_module("zlib_ng.zlib_ng")
    except ImportError:
        return zlib


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of `data` behind bytes whose CRC-32 is `value`."""
    result: int = fastest().crc32(data, value)
    return result


def adler32(data: bytes | bytearray | memoryview, value: int = 1) -> int:
    """Return the Adler-32 of `data` behind bytes whose Adler-32 is `value`."""
    result: int = fastest().adler32(data, value)
    return result
