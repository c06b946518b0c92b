"""CRC-32 and Adler-32: by zlib-ng where its package is installed, which is some four and fifteen times as fast. Also
combines CRC-32s of pieces to that of the whole.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Iterable
from types import ModuleType

_POLYNOMIAL = 0xEDB88320  # of CRC-32, bits reversed, as zip and zlib have it


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


def combine(pieces: Iterable[tuple[int, int, int]]) -> int:
    """Return the CRC-32 of `pieces` put together, each (position, number of bytes, CRC-32), in any order."""
    whole = 0
    for _, length, crc in sorted(pieces):
        whole = _multiply(_shift(length), whole) ^ crc if whole else crc
    return whole


def _multiply(left: int, right: int) -> int:
    """Return the product of two polynomials, modulo the CRC's."""
    product, bit = 0, 1 << 31
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Return x to the power of 8 × `length`, modulo the CRC's polynomial."""
    power, square = 1 << 31, 1 << 23  # 1, and x to the power of 8
    while length:
        if length & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        length >>= 1
    return power
