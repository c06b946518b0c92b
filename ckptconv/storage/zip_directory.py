"""Locates the directory of a zip archive, and gives the names that different readers take from an entry.

Readers disagree. torch (miniz) takes the last end record that it finds, whether or not its comment reaches the end of
the file. Python's zipfile takes the zip64 record before the locator, miniz the one that the locator points to. miniz
looks up names without regard to case, and zipfile may take another name from an extra field. Where two readers would
disagree, this module raises an error or returns both. Source: PKWARE's APPNOTE.TXT, miniz 3.0, CPython's zipfile.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

# The records of a zip archive, and their signatures.
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
# After the data of a member whose checksum was not known before.
DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
ENTRY = struct.Struct("<4s6H3I5H2I")
ENTRY_SIGNATURE = b"PK\x01\x02"
END = struct.Struct("<4s4H2IH")
END_SIGNATURE = b"PK\x05\x06"
LOCATOR = struct.Struct("<4sIQI")
LOCATOR_SIGNATURE = b"PK\x06\x07"
END64 = struct.Struct("<4sQ2H2I4Q")
END64_SIGNATURE = b"PK\x06\x06"
_FIELD = struct.Struct("<2H")
ZIP64_FIELD, _UNICODE_FIELD = 1, 0x7075
# Replaces a number that needs more bits, which a zip64 record or field then holds.
ZIP64 = 0xFFFFFFFF
_ZIP64_COUNT = 0xFFFF
# Bytes of the end record with the zip64 records before it, and of these with the longest comment after them.
END_RECORDS = END64.size + LOCATOR.size + END.size
TAIL = END_RECORDS + (1 << 16)
# Names that file systems and Python's zipfile rewrite: they turn \\ into /, and drop empty parts, `.` and `..`.
_ODD = re.compile(r"\\|^/|//|(?:^|/)\.\.?(?:/|$)", re.MULTILINE)
_LEFT_OUT = ("", ".", "..")


class ContradictionError(Exception):
    """The end of an archive contradicts itself. Holds the reason only."""


class DisksError(Exception):
    """The archive is one file of several."""


class ZipDirectory(NamedTuple):
    """The directory: bytes `start` to `start` + `size` of an archive, with `members` entries."""

    start: int
    size: int
    members: int


def find_end(tail: bytes) -> int:
    """Return the offset of the last end record in `tail`, the end of an archive, as torch finds it; -1 if none."""
    return tail.rfind(END_SIGNATURE, 0, max(len(tail) - END.size, 0) + len(END_SIGNATURE))


def ends_there(tail: bytes, at: int) -> bool:
    """Return whether the end record at byte `at` of `tail`, with its comment, extends to the end of the archive."""
    return at >= 0 and at + END.size + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail)


def directory_of(tail: bytes, at: int, position: int) -> ZipDirectory:
    """Return the directory to which the end record at byte `at` of `tail`, byte `position` of the archive, points.

    Raises ContradictionError if some reader would find another directory or none, DisksError for a multi-part archive.
    """
    _, disk, first_disk, rows, count, size, start, _ = END.unpack_from(tail, at)
    limit = position
    if tail[max(at - LOCATOR.size, 0) : at].startswith(LOCATOR_SIGNATURE):
        limit = position - LOCATOR.size - END64.size
        _, where_disk, where, disks = LOCATOR.unpack_from(tail, at - LOCATOR.size)
        record = tail[max(at - LOCATOR.size - END64.size, 0) : at - LOCATOR.size]
        if where != limit or len(record) != END64.size or not record.startswith(END64_SIGNATURE):
            raise ContradictionError(
                f"its zip64 end record is not at byte {where}: data was inserted or removed before it"
            )
        _, length, _, _, disk, first_disk, rows64, count64, size64, start64 = END64.unpack(record)
        narrow = (
            (rows, rows64, _ZIP64_COUNT), (count, count64, _ZIP64_COUNT), (size, size64, ZIP64), (start, start64, ZIP64)
        )  # fmt: skip
        if length != END64.size - 12 or any(stated not in (most, min(true, most)) for stated, true, most in narrow):
            raise ContradictionError("its two end records contradict each other")
        rows, count, size, start = rows64, count64, size64, start64
        if where_disk or disks > 1:
            raise DisksError
    if disk or first_disk or rows != count:
        raise DisksError
    # Nothing may lie between the directory and the end records. Data put before an archive, or another archive, shifts
    # one of `start + size` and `limit` and not the other.
    if start + size != limit or count * ENTRY.size > size:
        raise ContradictionError(
            f"its directory of {count} members and {size} bytes at byte {start} should end at byte {limit}, but does "
            "not"
        )
    return ZipDirectory(start, size, count)


def extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and content of each extra field of a member, up to a malformed one."""
    while len(extra) >= _FIELD.size:
        kind, length = _FIELD.unpack_from(extra)
        if length > len(extra) - _FIELD.size:
            return
        yield kind, extra[_FIELD.size : _FIELD.size + length]
        extra = extra[_FIELD.size + length :]


# ------------------------------------------------------------------------------------------------------------- names


def decoded(raw: bytes, is_utf8: bool) -> str:
    """Decode the name of a member: as UTF-8 if it is valid UTF-8, else as code page 437.

    The flag `is_utf8` does not decide, as torch compares bytes and looks for UTF-8. Raises UnicodeDecodeError if the
    flag is set and the name is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        if is_utf8:
            raise
        return raw.decode("cp437")


def other_names(raw: bytes, is_utf8: bool, extra: bytes) -> Iterator[str]:
    """Yield the names that zipfile and other readers may take instead of the decoded bytes.

    They are the bytes in code page 437, if not ASCII and not flagged as UTF-8, and the name in an extra field for
    Unicode, if that has the CRC of `raw`.
    """
    if not is_utf8 and not raw.isascii():
        yield raw.decode("cp437")
    for kind, content in extra_fields(extra):
        if kind == _UNICODE_FIELD and len(content) >= 5:
            version, crc = content[0], int.from_bytes(content[1:5], "little")
            if version == 1 and crc == zlib.crc32(raw):
                yield content[5:].decode("utf-8", "replace")


def normal(name: str) -> str:
    """Return `name` as seen by readers that ignore case, and by file systems; without the slash after a directory."""
    if not _ODD.search(name):
        return name.lower()
    return "/".join(part for part in name.lower().replace("\\", "/").split("/") if part not in _LEFT_OUT)


def same_inside(name: str, other: str) -> bool:
    """Return whether two names are equal below the outermost directory, or `name` is not ASCII there."""
    inner = name.partition("/")[2]
    return inner == other.partition("/")[2] or not inner.isascii()
