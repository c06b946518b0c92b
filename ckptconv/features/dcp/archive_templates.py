"""Recognize archives that match one already read, without parsing them.

A checkpoint has an archive for each chunk of each tensor, a million of them on many ranks. Most are identical byte for
byte, except for the data, its checksum, and an identifier made from checksums. Parsing each one anew would take longer
than moving its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.storage.reading import Reader
from ckptconv.storage.records import Record
from ckptconv.storage.zip_directory import (
    DESCRIPTOR_SIGNATURE,
    END64,
    END_RECORDS,
    ENTRY,
    ENTRY_SIGNATURE,
    LOCAL_HEADER,
)
from ckptconv.tensors.lazy import Stored

# A record made from the checksums of the others.
_IDENTIFIER = b"/.data/serialization_id"
# A longer head or tail is not that of an archive of one tensor.
_LONGEST = 1 << 14
# Patterns kept for each size of archive: there is one for each dtype and shape.
_KEPT = 64


class Alike(NamedTuple):
    """A chunk found by a pattern: its tensor, and the storage that holds just that tensor."""

    tensor: Stored
    record: Record


class _Pattern(NamedTuple):
    """The bytes that matching archives share: `head` before the data, `tail` after it, with zeros at the ranges
    `blanks`, in which they differ. `crc` is the offset of the data's CRC in the tail; `tensor` is one whose data begins
    at byte `start`."""

    head: bytes
    tail: bytes
    blanks: tuple[tuple[int, int], ...]
    crc: int
    start: int
    tensor: Stored
    nbytes: int


class ArchivePatterns:
    """Patterns of archives of one tensor each, by the archive's size."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Pattern]] = {}

    def find(self, reader: Reader, start: int, size: int) -> Alike | None:
        """Return the tensor in the archive of `size` bytes at byte `start`, if it matches a known pattern."""
        for pattern in self._known.get(size, ()):
            head, tail = pattern.head, pattern.tail
            if reader.read_at(start, len(head)) != head:
                continue
            candidate = bytearray(reader.read_at(start + size - len(tail), len(tail)))
            crc = int.from_bytes(candidate[pattern.crc : pattern.crc + 4], "little")
            for low, high in pattern.blanks:
                candidate[low:high] = bytes(high - low)
            if candidate == tail:
                offset = start + len(head)
                known = pattern.tensor
                within = known.offset - pattern.start
                tensor = Stored(reader.file, offset + within, known.dtype, known.shape, known.strides)
                return Alike(tensor, Record(offset, pattern.nbytes, crc))
        return None

    def learn(self, reader: Reader, start: int, size: int, tensor: Stored, record: Record) -> None:
        """Remember an archive that was read, and holds `tensor` in its only storage."""
        known = self._known.setdefault(size, [])
        end = record.offset + record.size
        length = start + size - end
        if len(known) >= _KEPT or record.offset - start > _LONGEST or length > _LONGEST or not record.crc:
            return
        head, tail = reader.read_at(start, record.offset - start), bytearray(reader.read_at(end, length))
        blanks: list[tuple[int, int]] = []
        crc = -1
        for low, high, is_data in _varying(bytes(tail), end - start, record.offset - start):
            blanks.append((low, high))
            crc = low if is_data else crc
        if crc < 0 or any(not 0 <= low < high <= length for low, high in blanks):
            return
        for low, high in blanks:
            tail[low:high] = bytes(high - low)
        known.append(_Pattern(head, bytes(tail), tuple(blanks), crc, record.offset, tensor, record.size))


def _varying(tail: bytes, base: int, data: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the ranges of `tail`, which begins at byte `base` of the archive, where matching archives may differ, and
    whether each is the checksum, in the central directory, of the data, which begins at byte `data`."""
    if len(tail) < END_RECORDS:
        return
    start = END64.unpack_from(tail, len(tail) - END_RECORDS)[-1]
    at = start - base
    while at >= 0 and tail.startswith(ENTRY_SIGNATURE, at):
        entry = ENTRY.unpack_from(tail, at)
        size, header, name_length = entry[9], entry[16], entry[10]
        name = tail[at + ENTRY.size : at + ENTRY.size + name_length]
        crc_at = at + 16
        is_identifier = name.endswith(_IDENTIFIER)
        local = header - base
        if is_identifier and 0 <= local <= len(tail) - LOCAL_HEADER.size:
            names, extra = LOCAL_HEADER.unpack_from(tail, local)[-2:]
            content = local + LOCAL_HEADER.size + names + extra
            yield content, content + size, False
            yield from _descriptor(tail, content + size)
            yield crc_at, crc_at + 4, False
        elif name.endswith(b"/data/0"):
            yield from _descriptor(tail, 0)
            yield crc_at, crc_at + 4, True
        at += ENTRY.size + sum(entry[10:13])


def _descriptor(tail: bytes, at: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the range of the checksum in the data descriptor that follows a member's data."""
    if tail.startswith(DESCRIPTOR_SIGNATURE, at):
        yield at + 4, at + 8, False
