"""Find the directory of a zip archive as torch does, which checks less than `archive`: in a file that only ends as an
archive, or that is refused. Nothing that it finds is converted.

Source: miniz, `mz_zip_reader_read_central_dir`.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptconv.storage.reading import Reader
from ckptconv.storage.zip_directory import (
    END,
    END64,
    END64_SIGNATURE,
    ENTRY,
    ENTRY_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
    TAIL,
    find_end,
)


def ends_as_zip(reader: Reader, after: int = 0) -> bool:
    """Return whether a file ends as a zip archive, with its end record at byte `after` or later, but does not begin as
    one.

    zipfile opens those, wherever they begin.
    """
    directory = directory_in(reader)
    if directory is None or directory.size < ENTRY.size or directory.end < after:
        return False
    # At the offset it states, or directly before the end record if something was put before the archive.
    places = directory.start, directory.end - directory.size
    return any(place >= 0 and part_of(reader, place, len(ENTRY_SIGNATURE)) == ENTRY_SIGNATURE for place in places)


class Directory(NamedTuple):
    """A directory of `members` entries, `size` bytes from byte `start`. The end records begin at byte `end`."""

    start: int
    size: int
    members: int
    end: int


def directory_in(reader: Reader) -> Directory | None:
    """Return the directory that torch would read; None if there is no end record."""
    length = min(TAIL, reader.file.size)
    tail = reader.read_at(reader.file.size - length, length)
    at = find_end(tail)
    if at < 0 or at + END.size > length:
        return None
    _, _, _, _, count, size, start, _ = END.unpack_from(tail, at)
    end = reader.file.size - length + at
    locator = tail[max(at - LOCATOR.size, 0) : at]
    if locator.startswith(LOCATOR_SIGNATURE) and len(locator) == LOCATOR.size:
        place = LOCATOR.unpack(locator)[2]
        record = part_of(reader, place, END64.size)
        if record.startswith(END64_SIGNATURE) and len(record) == END64.size:
            count, size, start = END64.unpack(record)[7:]
            end = place
    return Directory(start, size, count, end)


def part_of(reader: Reader, start: int, length: int) -> bytes:
    """Read `length` bytes from byte `start`, or as many as the file has."""
    stop = min(start + length, reader.file.size)
    return reader.read_at(start, stop - start) if start < stop else b""
