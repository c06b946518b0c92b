"""Packs values as stores of arrays do: frames of zstandard, and CRC-32C."""

from __future__ import annotations

import zstandard


def crc32c(data: bytes) -> int:
    """Bit by bit, by the polynomial alone."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def packed(data: bytes, level: int = 1) -> bytes:
    """A frame of zstandard that does not tell the size of its content."""
    made = zstandard.ZstdCompressor(level=level).compressobj()
    return made.compress(data) + made.flush()
