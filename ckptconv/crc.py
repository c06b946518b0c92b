"""CRC-32 of a whole from those of its pieces, so that pieces can be made in any order and by several threads.

A CRC is a remainder of polynomials over GF(2): appending n bytes multiplies it by x to the power of 8n.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320  # of CRC-32, bits reversed, as zip and zlib have it


def combine(pieces: Iterable[tuple[int, int, int]]) -> int:
    """The CRC-32 of what `pieces`, each (position, bytes, CRC-32), are together; they may come in any order."""
    whole = 0
    for _, length, crc in sorted(pieces):
        whole = _multiply(_shift(length), whole) ^ crc if whole else crc
    return whole


def _multiply(one: int, other: int) -> int:
    """The product of two polynomials, modulo the CRC's."""
    product, bit = 0, 1 << 31
    while one:
        if one & bit:
            product ^= other
            one ^= bit
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x to the power of 8 × `length`."""
    power, square = 1 << 31, 1 << 23  # 1, and x to the power of 8
    while length:
        if length & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        length >>= 1
    return power
