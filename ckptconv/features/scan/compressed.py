"""Compressed files: their first bytes, and their content, up to damage, as Python's readers return it."""

from __future__ import annotations

import zlib
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.storage.reading import Reader

# The memory for the strongest preset of xz.
_LZMA_MEMORY = 66 << 20
# Bytes read at once, and the most compressed streams that are joined; gzip and bgzip write several.
_PIECE, _STREAMS = 1 << 14, 1000
_GZIP, _BZIP2, _XZ = b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0"
# The size of the header of a stream of the old lzma. One byte follows, which begins its data.
_LZMA_HEADER = 13


def is_compressed(head: bytes, size: int) -> bool:
    """Return whether a file that begins with `head` is compressed by gzip, bzip2, xz, zlib or the old lzma."""
    return head.startswith((_GZIP, _BZIP2, _XZ)) or _is_zlib(head) or _is_lzma(head)


def _is_zlib(head: bytes) -> bool:
    return head[:1] == b"\x78" and head[1:2] in (b"\x01", b"\x5e", b"\x9c", b"\xda")


def _is_lzma(head: bytes) -> bool:
    """Return whether liblzma accepts `head` as a header: properties, a dictionary of 2^n or 3 * 2^n bytes, a length."""
    if len(head) <= _LZMA_HEADER or head[_LZMA_HEADER] or head[0] >= 225:
        return False
    dictionary, length = int.from_bytes(head[1:5], "little"), int.from_bytes(head[5:_LZMA_HEADER], "little")
    highest = 1 << dictionary.bit_length() >> 1
    is_sized = 0 < length < 1 << 38 or length == (1 << 64) - 1
    return is_sized and dictionary in (highest, highest + highest // 2, 0xFFFFFFFF)


def _decompressor(head: bytes) -> Any:
    """Return a decompressor for the stream that begins with `head`; None if it is not compressed."""
    import bz2
    import lzma

    if head.startswith(_GZIP):
        return zlib.decompressobj(31)
    if head.startswith(_BZIP2):
        return bz2.BZ2Decompressor()
    if head.startswith(_XZ) or _is_lzma(head):
        return lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)
    return zlib.decompressobj() if _is_zlib(head) else None


def decompressed(reader: Reader, most: int) -> tuple[bytes, str]:
    """Return at most `most` bytes of the content of a compressed file, and the reason why there are no more; "" if
    there is no mistake.

    As in Python's readers, streams are joined, also with zeros between them, the bytes after them are left out, and the
    content before damage is returned.
    """
    out = _Content(reader, most)
    error = out.fill(reader.file.size)
    if error:
        # The failed step returned nothing: find how far smaller steps come.
        reached = out.position
        out = _Content(reader, most)
        out.fill(reached)
    return bytes(out.data), error


class _Content:
    """The content so far; `position` is where the last piece that was read begins."""

    def __init__(self, reader: Reader, most: int) -> None:
        self.data = bytearray()
        self.position = 0
        self._reader, self._most = reader, most

    def fill(self, steady: int) -> str:
        """Decompress streams, from byte `steady` on in the smallest steps. Return the mistake; "" if there is none."""
        import lzma

        at, size = 0, self._reader.file.size
        for _ in range(_STREAMS):
            decompressor = _decompressor(self._reader.read_at(at, min(_LZMA_HEADER + 1, size - at)))
            if decompressor is None:
                return ""
            try:
                at = self._stream(decompressor, at, steady)
            except CkptconvError:  # the file cannot be read
                raise
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
                return str(error)
            at = self._behind_zeros(at)
            if at == size or len(self.data) >= self._most:
                return ""
        return f"it has more than {_STREAMS} streams"

    def _stream(self, decompressor: Any, at: int, steady: int) -> int:
        """Decompress the stream at byte `at`. Return its end, or the position at which there is enough content."""
        size, data = self._reader.file.size, b""
        while not decompressor.eof and len(self.data) < self._most:
            if not data and getattr(decompressor, "needs_input", True):
                self.position = at
                length = 1 if at >= steady else min(_PIECE, steady - at)
                data = self._reader.read_at(at, min(length, size - at))
                at += len(data)
            is_last = not data
            output = decompressor.decompress(data, self._most - len(self.data))
            data = getattr(decompressor, "unconsumed_tail", b"")
            self.data += output
            if is_last and not output and at == size:
                break
        return at - len(decompressor.unused_data)

    def _behind_zeros(self, at: int) -> int:
        size = self._reader.file.size
        while at < size:
            data = self._reader.read_at(at, min(_PIECE, size - at))
            after_zeros = data.lstrip(b"\0")
            at += len(data) - len(after_zeros)
            if after_zeros:
                break
        return at
