"""How pickles, arrays of numpy and compressed files begin."""

from __future__ import annotations

import re
import zlib
from typing import Any

from ckptconv.formats.instead import begins_as_pickle

# What the strongest preset of xz takes.
_LZMA_MEMORY = 66 << 20
# In a header of numpy, types of numbers, texts, times and raw bytes.
_PLAIN_IN_NPY = re.compile(r"[<>|=]?[?biufcmMSaUV][0-9]*(?:\[\w+\])?")
# numpy itself reads no longer header unless it is told to.
_MOST_NPY = 10_000


def is_pickle(head: bytes, size: int) -> bool:
    return (head[:1] == b"\x80" and b"\x00" < head[1:2] <= b"\x05") or begins_as_pickle(head)


def is_compressed(head: bytes, size: int) -> bool:
    is_zlib = head[:1] == b"\x78" and head[1:2] in (b"\x01", b"\x5e", b"\x9c", b"\xda")
    return is_zlib or head.startswith((b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0", b"\x5d\x00\x00"))


def decompressor(head: bytes) -> Any:
    """Return what decompresses a file that begins with `head`."""
    import bz2
    import lzma

    if head == b"BZ":
        return bz2.BZ2Decompressor()
    if head in (b"\xfd7", b"\x5d\x00"):
        return lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)
    return zlib.decompressobj(31 if head == b"\x1f\x8b" else 15)


def place_of_header(head: bytes) -> tuple[int, int]:
    """Return where the header of a numpy file begins, and its length."""
    begin = 12 if head[6:7] >= b"\x02" else 10
    return begin, int.from_bytes(head[8:begin], "little")


def header_in(head: bytes) -> bytes:
    begin, length = place_of_header(head)
    return head[begin : begin + length]


def is_plain(header: bytes) -> bool:
    """Whether a header of numpy says that the elements are no objects, which are pickled. It is a literal of Python."""
    import ast

    try:
        told = ast.literal_eval(header[:_MOST_NPY].decode("latin-1").strip())
        return _are_plain(told["descr"])
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return False


def _are_plain(descr: Any) -> bool:
    if type(descr) is str:
        return _PLAIN_IN_NPY.fullmatch(descr) is not None
    if type(descr) is tuple:
        return len(descr) == 2 and _are_plain(descr[0])
    return type(descr) is list and all(type(each) is tuple and len(each) > 1 and _are_plain(each[1]) for each in descr)
