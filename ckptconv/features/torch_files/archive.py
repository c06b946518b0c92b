"""Plan zip archives of any content, with a checksum for every member.

Source: PKWARE's APPNOTE.TXT. The checksum of a member is known only after its bytes were written. A data descriptor
after the member holds it, and so does the directory at the end.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.plan import Data, FilePlan, Literal, Part, Trailer
from ckptconv.storage.crc import combine
from ckptconv.tensors.lazy import LazyTensor

ALIGNMENT = 64

_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR_64 = struct.Struct("<4sI2Q")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_PADDING = 0x4246  # "FB", filled with Z
_ZIP64 = 0x0001
_LIMIT = 0xFFFFFFFF
_UTF8, _DESCRIBED = 0x0800, 0x0008


class Member(NamedTuple):
    """A member of an archive: its name, and its content, some bytes, then a tensor in C order."""

    name: str
    head: bytes = b""
    tensor: LazyTensor | None = None


class _Record(NamedTuple):
    """A member in the archive: the offset of its header, its size in bytes, the first `known` of which have the CRC-32
    `crc`. The others are a tensor's."""

    name: str
    header: int
    size: int
    known: int
    crc: int


def file_plan(name: str, members: Iterable[Member]) -> FilePlan:
    """Plan an archive. Its contents are aligned to `ALIGNMENT` bytes; the CRC-32 of a tensor has its member's name."""
    parts: list[Part] = []
    records: list[_Record] = []
    at = 0
    for inner, head, tensor in members:
        size = len(head) + (0 if tensor is None else tensor.nbytes)
        record = _Record(inner, at, size, len(head), zlib.crc32(head))
        header = _header(inner, at, empty=not size)
        parts.append(Literal(at, header))
        at += len(header)
        if head:
            parts.append(Literal(at, head))
            at += len(head)
        of = inner if size > len(head) else ""
        if tensor is not None and of:
            parts.append(Data(at, tensor, inner))
            at += size - len(head)
        records.append(record)
        if size:
            length = _descriptor_form(record).size
            parts.append(Trailer(at, length, functools.partial(_descriptor, record), of))
            at += length
    size = _directory_size(records)
    parts.append(Trailer(at, size, functools.partial(_directory, at, tuple(records))))
    return FilePlan(name, at + size, tuple(parts))


def _header(name: str, at: int, empty: bool) -> bytes:
    """Return a local header for byte `at`, padded so that the content after it is aligned."""
    raw = name.encode()
    fixed = _LOCAL.size + len(raw) + 4
    padding = -(at + fixed) % ALIGNMENT
    flags = _UTF8 | (0 if empty else _DESCRIBED)
    head = _LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(raw), padding + 4)
    return head + raw + struct.pack("<2H", _PADDING, padding) + b"Z" * padding


def crc_of(record: _Record, digests: Mapping[str, int]) -> int:
    unknown = record.size - record.known
    if not unknown:
        return record.crc
    if not record.known:
        return digests[record.name]
    return combine([(0, record.known, record.crc), (1, unknown, digests[record.name])])


def _descriptor_form(record: _Record) -> struct.Struct:
    return _DESCRIPTOR_64 if record.size >= _LIMIT else _DESCRIPTOR


def _descriptor(record: _Record, digests: Mapping[str, int]) -> bytes:
    return _descriptor_form(record).pack(b"PK\x07\x08", crc_of(record, digests), record.size, record.size)


def _directory(at: int, records: Sequence[_Record], digests: Mapping[str, int]) -> bytes:
    """Return the central directory at byte `at`, and the end records, which always include those of zip64."""
    entries = b"".join(_entries(records, digests))
    end = at + len(entries)
    count = len(records)
    short = min(count, 0xFFFF)
    return b"".join(
        (
            entries,
            _END_64.pack(b"PK\x06\x06", _END_64.size - 12, 0x031E, 45, 0, 0, count, count, len(entries), at),
            _LOCATOR.pack(b"PK\x06\x07", 0, end, 1),
            _END.pack(b"PK\x05\x06", 0, 0, short, short, min(len(entries), _LIMIT), min(at, _LIMIT), 0),
        )
    )


def _directory_size(records: Sequence[_Record]) -> int:
    entries = sum(_ENTRY.size + len(record.name.encode()) + len(_extra(record)) for record in records)
    return entries + _END_64.size + _LOCATOR.size + _END.size


def _extra(record: _Record) -> bytes:
    """Return the field with the numbers that do not fit into 32 bits."""
    if record.size < _LIMIT and record.header < _LIMIT:
        return b""
    sizes = struct.pack("<2Q", record.size, record.size) if record.size >= _LIMIT else b""
    wide = sizes + (struct.pack("<Q", record.header) if record.header >= _LIMIT else b"")
    return struct.pack("<2H", _ZIP64, len(wide)) + wide


def _entries(records: Sequence[_Record], digests: Mapping[str, int]) -> Iterator[bytes]:
    for record in records:
        raw = record.name.encode()
        extra = _extra(record)
        flags = _UTF8 | (_DESCRIBED if record.size else 0)
        size = min(record.size, _LIMIT)
        yield _ENTRY.pack(
            b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc_of(record, digests), size, size, len(raw), len(extra), 0, 0, 0, 0,
            min(record.header, _LIMIT),
        )  # fmt: skip
        yield raw
        yield extra
