"""Where the directory of a zip archive is, and what its names and extra fields mean to different readers.

Readers disagree: torch (miniz) takes the last end record that it finds, whether or not its comment reaches the end of
the file; Python's zipfile takes the zip64 record before the locator, and miniz the one that the locator points to;
miniz looks up names without regard to case, and zipfile may see another name in an extra field. What two of them would
read differently is refused here, or told to the caller. Source: PKWARE's APPNOTE.TXT, miniz 3.0, CPython's zipfile.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

# The parts of a zip archive, and what each begins with.
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
LOCAL_SIGNATURE = b"PK\x03\x04"
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
# In place of a number that needs more bits, and stands in a zip64 record or field.
ZIP64 = 0xFFFFFFFF
_ZIP64_COUNT = 0xFFFF
# The end record and the zip64 records before it; and with the longest comment after it.
END_RECORDS = END64.size + LOCATOR.size + END.size
TAIL = END_RECORDS + (1 << 16)
# Names that file systems and Python's zipfile spell in another way: \\ for /, and parts that are left out.
_ODD = re.compile(r"\\|^/|//|(?:^|/)\.\.?(?:/|$)", re.MULTILINE)
_LEFT_OUT = ("", ".", "..")


class ContradictionError(Exception):
    """What is wrong with the end of an archive: the reason only."""


class DisksError(Exception):
    """The archive is one of several files."""


class Directory(NamedTuple):
    """Bytes `start` to `start` + `size` of an archive, with an entry for each of `members`."""

    start: int
    size: int
    members: int


def find_end(tail: bytes) -> int:
    """Where in `tail`, the end of an archive, the last end record is, as torch finds it; -1 if there is none."""
    return tail.rfind(END_SIGNATURE, 0, max(len(tail) - END.size, 0) + len(END_SIGNATURE))


def ends_there(tail: bytes, at: int) -> bool:
    """Whether the end record at byte `at` of `tail` ends the archive with its comment."""
    return at >= 0 and at + END.size + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail)


def directory_of(tail: bytes, at: int, position: int) -> Directory:
    """The directory that the end record at byte `at` of `tail`, byte `position` of the archive, tells of.

    Raises ContradictionError where readers would find another one, or none, DisksError for a part of an archive.
    """
    _, disk, first_disk, here, count, size, start, _ = END.unpack_from(tail, at)
    limit = position
    if tail[max(at - LOCATOR.size, 0) : at].startswith(LOCATOR_SIGNATURE):
        limit = position - LOCATOR.size - END64.size
        _, where_disk, where, disks = LOCATOR.unpack_from(tail, at - LOCATOR.size)
        record = tail[max(at - LOCATOR.size - END64.size, 0) : at - LOCATOR.size]
        if where != limit or len(record) != END64.size or not record.startswith(END64_SIGNATURE):
            raise ContradictionError(
                f"its zip64 end record is not at byte {where}, where it should be: something was put before it or "
                "taken out"
            )
        _, length, _, _, disk, first_disk, here64, count64, size64, start64 = END64.unpack(record)
        narrow = (
            (here, here64, _ZIP64_COUNT), (count, count64, _ZIP64_COUNT), (size, size64, ZIP64), (start, start64, ZIP64)
        )  # fmt: skip
        if length != END64.size - 12 or any(told not in (most, min(true, most)) for told, true, most in narrow):
            raise ContradictionError("its two end records contradict each other")
        here, count, size, start = here64, count64, size64, start64
        if where_disk or disks > 1:
            raise DisksError
    if disk or first_disk or here != count:
        raise DisksError
    # Nothing lies between the directory and the end records; what was put before the archive, or an archive after
    # another, moves one and not the other.
    if start + size != limit or count * ENTRY.size > size:
        raise ContradictionError(
            f"its directory of {count} members and {size} bytes at byte {start} does not end at byte {limit}, where it "
            "should"
        )
    return Directory(start, size, count)


def extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """The extra fields of a member: kind and content, as far as they are sound."""
    while len(extra) >= _FIELD.size:
        kind, length = _FIELD.unpack_from(extra)
        if length > len(extra) - _FIELD.size:
            return
        yield kind, extra[_FIELD.size : _FIELD.size + length]
        extra = extra[_FIELD.size + length :]


# ------------------------------------------------------------------------------------------------------------- names


def decoded(raw: bytes, is_utf8: bool) -> str:
    """The name of a member. torch compares bytes, and looks for UTF-8, whatever the flag says.

    Raises UnicodeDecodeError for a name that is not in UTF-8, and says that it is.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        if is_utf8:
            raise
        return raw.decode("cp437")


def other_names(raw: bytes, is_utf8: bool, extra: bytes) -> Iterator[str]:
    """What zipfile and other readers may take for the name of a member, where that is not plain ASCII.

    Without the flag for UTF-8 it is in code page 437, or else in an extra field, with a checksum of the name.
    """
    if not is_utf8 and not raw.isascii():
        yield raw.decode("cp437")
    for kind, content in extra_fields(extra):
        if kind == _UNICODE_FIELD and len(content) >= 5:
            version, crc = content[0], int.from_bytes(content[1:5], "little")
            if version == 1 and crc == zlib.crc32(raw):
                yield content[5:].decode("utf-8", "replace")


def normal(name: str) -> str:
    """How a name reads for whoever ignores case, and what file systems ignore; directories without the last slash."""
    if not _ODD.search(name):
        return name.lower()
    return "/".join(part for part in name.lower().replace("\\", "/").split("/") if part not in _LEFT_OUT)


def same_inside(name: str, other: str) -> bool:
    """Whether two names are the same below the outermost directory, as far as that is written in ASCII."""
    own = name.partition("/")[2]
    return own == other.partition("/")[2] or not own.isascii()


def are_plain(names: Collection[str], prefix: str) -> bool:
    """Whether `names` all begin with `prefix`, the rest of each is what `normal` makes of it, and none has a NUL."""
    lines = "\n" + "\n".join(names)
    if not lines.count("\n") == lines.count("\n" + prefix) == len(names):
        return False
    inner = lines.replace("\n" + prefix, "\n")
    return "\0" not in lines and inner == inner.lower() and not _ODD.search(inner)
