"""Find what other readers see in a file that is refused or not read as a zip archive: an attack, or a second format.

`archive` refuses an archive that two readers read differently. This module reads the file as torch does, which checks
less. Nothing that it finds is converted.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.reading import Reader
from ckptconv.storage.zip_directory import ENTRY, ENTRY_SIGNATURE, LOCAL_HEADER
from ckptconv.storage.zip_elsewhere import directory_in, part_of

# Bytes of a directory that are read at a time, and the most that an entry takes.
_WINDOW, _LONGEST = 1 << 20, ENTRY.size + 3 * 0xFFFF
# Bytes of deflated data that may come before the first that they stand for.
_TABLES = 1 << 10
# Bytes of damaged data that are inflated at a time.
_STEP = 1 << 14


class ZipEntry(NamedTuple):
    """An entry of the directory. `packed` is the member's size in the archive, `header` the offset of its header."""

    name: bytes
    flags: int
    method: int
    packed: int
    header: int


def entries(reader: Reader) -> Iterator[ZipEntry]:
    """Yield the entries of the directory that torch would read, up to a malformed one."""
    directory = directory_in(reader)
    if directory is None:
        return
    window, begin, place = b"", directory.start, 0
    for _ in range(directory.members):
        if len(window) - place < _LONGEST and begin + len(window) < directory.start + directory.size:
            begin += place
            window, place = part_of(reader, begin, min(_WINDOW, directory.start + directory.size - begin)), 0
        if not window.startswith(ENTRY_SIGNATURE, place) or place + ENTRY.size > len(window):
            return
        fields = ENTRY.unpack_from(window, place)
        name_length, extra_length, comment_length = fields[10:13]
        place += ENTRY.size
        yield ZipEntry(window[place : place + name_length], fields[3], fields[4], fields[8], fields[16])
        place += name_length + extra_length + comment_length


def count(reader: Reader) -> int:
    """Return the number of entries in the directory that torch would read, as the directory states it."""
    directory = directory_in(reader)
    return directory.members if directory else 0


def payload_of(reader: Reader, entry: ZipEntry) -> int | None:
    """Return where the content of a member begins, as it is stored; None if it cannot be found."""
    header = part_of(reader, entry.header, LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_SIGNATURE):
        return None
    name_length, extra_length = struct.unpack_from("<2H", header, 26)
    return entry.header + LOCAL_HEADER.size + int(name_length) + int(extra_length)


def content(reader: Reader, entry: ZipEntry, most: int) -> bytes:
    """Return at most the first `most` bytes of a member's content; empty if it cannot be found."""
    start = payload_of(reader, entry)
    if start is None:
        return b""
    if entry.method != 8:
        return part_of(reader, start, min(entry.packed, most))
    data = part_of(reader, start, min(entry.packed, most + _TABLES))
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, most)
    except zlib.error:
        return _before_damage(data, most)


def _before_damage(data: bytes, most: int) -> bytes:
    """Return the inflated bytes before the damage in deflated `data`: Python's zipfile returns them."""
    inflater, out = zlib.decompressobj(-zlib.MAX_WBITS), bytearray()
    with contextlib.suppress(zlib.error):
        for start in range(0, len(data), _STEP):
            before = inflater.copy()
            try:
                out += inflater.decompress(data[start : start + _STEP])
            except zlib.error:
                for at in range(start, start + _STEP):
                    out += before.decompress(data[at : at + 1])
                break
            if len(out) >= most:
                break
    return bytes(out[:most])
