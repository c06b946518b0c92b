"""List tar archives as Python's tarfile does, by their headers.

tarfile supports member types and extension headers that plain archives lack. They are interpreted as tarfile does, but
only to decide what an archive is meant for: its readers refuse an odd one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckptconv.errors import AGAIN, CorruptError
from ckptconv.storage.reading import Reader
from ckptconv.storage.tar_header import is_tar
from ckptconv.text import brief

_BLOCK = 512
_NAME, _SIZE, _KIND = slice(0, 100), slice(124, 136), slice(156, 157)
_LINK, _PREFIX = slice(157, 257), slice(345, 500)
# Mode, owners, times and devices. tarfile ends the archive at a header where one of them is not a number.
_NUMBERS = (slice(100, 108), slice(108, 116), slice(116, 124), slice(136, 148), slice(329, 337), slice(337, 345))
_FILES, _PAX, _PAX_FOR_ALL = (b"0", b"\0"), b"x", b"g"
# Other types that tarfile supports: GNU's and Sun's headers for the next member, and types without data, whatever size.
_LONG_NAME, _LONG_LINK, _SOLARIS_PAX = b"L", b"K", b"X"
_HEADERS = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL, _SOLARIS_PAX)
_LINKS = (b"1", b"2")
_DIRECTORY = b"5"
_NO_DATA = (*_LINKS, b"3", b"4", _DIRECTORY, b"6")
_KNOWN = (*_HEADERS, *_NO_DATA)
_MAX_PAX = 1 << 20
_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")
# Pax keys that affect a member's name or extent, and those that a header for a single member may have.
_TELLING, _OWN = ("path", "size", "linkpath", "GNU."), ("path", "size")
_MAX_MEMBERS = 100
# Zeros end an archive; they fill a record, of 10 KiB by default.
_MAX_PADDING = 1 << 20


class Span(NamedTuple):
    """Bytes `start` to `stop` of an archive, which a member's data takes."""

    start: int
    stop: int


class Listing:
    """The members of a tar archive by name, as tarfile finds them: of two with the same name, the last.

    `odd` is the error for the first thing in the archive that is no plain file.
    """

    def __init__(self, path: str) -> None:
        self.members: dict[str, Span] = {}
        self.odd: CorruptError | None = None
        self._path = path

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(f"{self._path} is not a valid tar archive: {reason}.", hint)

    def note(self, reason: str) -> None:
        """Remember the error for an oddity, unless there is an earlier one."""
        self.odd = self.odd or self.corrupt(reason, AGAIN)

    def add(self, name: str, span: Span | None) -> None:
        """Add a member; one without data has no span."""
        if name in self.members:
            self.note(f"it has two members named {brief(name)}")
        if span is not None:
            self.members[name] = span


def listed(reader: Reader, *, directories: bool = False) -> Listing:
    """List a tar archive as tarfile does. Note every member as odd that is no plain file, and, without `directories`,
    no directory: only an odd member can be read in two ways."""
    listing = Listing(reader.file.path)
    at, size = 0, reader.file.size
    # Values of preceding headers: for all members, for the next member, and the next member's long name.
    for_all: dict[str, str] = {}
    for_next: dict[str, str] = {}
    named = ""
    for _ in range(_MAX_MEMBERS):
        if at + _BLOCK > size:
            listing.note(f"it ends at byte {size} without an end marker: it was cut short")
            return listing
        header = reader.read_at(at, _BLOCK)
        if not any(header):
            if size - at > _MAX_PADDING or any(reader.read_at(at, size - at)):
                listing.note(f"data follows its end at byte {at}")
            return listing
        length = _number(header[_SIZE])
        if not is_tar(header) or length is None or None in (_number(header[field]) for field in _NUMBERS):
            listing.note(f"the header at byte {at} is missing or invalid")
            return listing
        header_at, start, kind = at, at + _BLOCK, header[_KIND]
        if kind == b"\0" and _text(header[_NAME]).endswith("/"):
            kind = _DIRECTORY
        is_directory = kind == _DIRECTORY and directories
        if kind not in (*_FILES, _PAX, _PAX_FOR_ALL) and not is_directory:
            listing.note(f"the member at byte {header_at} is not a plain file, but of type {kind!r}")
        if kind not in _KNOWN and "size" in for_next:
            digits = for_next["size"]
            length = int(digits) if digits.isdecimal() and len(digits) < 20 else size
        if kind in _NO_DATA:
            length = 0
        if start + length > size:
            listing.note(
                f"the member at byte {header_at} extends beyond the {size} bytes of the file: it was cut short"
            )
            return listing
        at = start + -(-length // _BLOCK) * _BLOCK
        if kind in _HEADERS:
            if (for_next or named) and kind != _PAX_FOR_ALL:
                listing.note(f"it has two headers for one member, the second at byte {header_at}")
            if length > _MAX_PAX:
                listing.note(f"the header at byte {header_at} has {length} bytes; at most {_MAX_PAX} are supported")
                return listing
            content = reader.read_at(start, min(at, size) - start)
            if kind == _LONG_NAME:
                named = _text(content)
            elif kind != _LONG_LINK:
                extended, end = _pax(content)
                if end != length or any(content[length:]):
                    listing.note(f"the extended header at byte {header_at} is malformed")
                telling = sorted(
                    key for key in extended if key.startswith(_TELLING) and (kind != _PAX or key not in _OWN)
                )
                if telling:
                    listing.note(f"the extended header at byte {header_at} contains {brief(telling[0])}")
                # If two precede one member, tarfile applies the first one last.
                for_all, for_next = (
                    (for_all | extended, for_next) if kind == _PAX_FOR_ALL else (for_all, extended | for_next)
                )
            continue
        pax = for_all | for_next
        header_name = "/".join(filter(None, map(_text, (header[_PREFIX], header[_NAME]))))
        name = pax.get("GNU.sparse.name") or pax.get("path") or named or header_name
        if name.endswith("/") and not is_directory:
            listing.note(f"the file at byte {header_at} has the name of a directory, {brief(name)}")
        target = listing.members.get(_text(header[_LINK])) if kind in _LINKS else None
        listing.add(name.rstrip("/"), target if kind in _NO_DATA else Span(start, start + length))
        for_next, named = {}, ""
    listing.note(f"it has more than {_MAX_MEMBERS} members")
    return listing


def _number(field: bytes) -> int | None:
    """Parse a number field: octal digits, or a big-endian binary number after a byte 0x80. None if it is neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8) if digits.isdigit() or not digits else None
    except ValueError:
        return None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _pax(data: bytes) -> tuple[dict[str, str], int]:
    """Parse the records "LENGTH KEY=VALUE\\n" of an extended header, up to a malformed one. Return their end too."""
    fields: dict[str, str] = {}
    at = 0
    while record := _RECORD.match(data, at):
        stop = at + int(record[1])
        if not record.end() < stop <= len(data) or data[stop - 1 : stop] != b"\n":
            break
        fields[record[2].decode("utf-8", "replace")] = data[record.end() : stop - 1].decode("utf-8", "replace")
        at = stop
    return fields, at
