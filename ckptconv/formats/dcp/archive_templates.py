"""Archives that are alike: what was read of one tells what another holds.

A checkpoint has an archive for every chunk of every tensor, a million of them on many ranks, and most are the same byte
for byte, but for the data, its checksum, and an identifier made of that. To read each as if nothing were known of it
would take longer than to move its data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.storage.files import Reader
from ckptconv.storage.records import Record
from ckptconv.tensors.lazy import Stored

# The parts of a zip archive that are looked at, as in `torch_zip`, which has checked the archive before.
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = b"PK\x07\x08"
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_SIZE = _END64.size + 20 + 22
# A record that is made of the checksums of the others.
_IDENTIFIER = b"/.data/serialization_id"
# Longer beginnings and ends are those of something else.
_LONGEST = 1 << 14
# So many are kept for one size of archive: of each dtype and shape there is one.
_KEPT = 64


class Alike(NamedTuple):
    """A chunk that was found by a pattern: its tensor, and the storage it is all of."""

    tensor: Stored
    record: Record


class _Pattern(NamedTuple):
    """What archives that are alike have in common: what is before and after the data, the latter with zeros where they
    differ, at `blanks`; where in it the data's checksum is; and the tensor of one whose data begins at byte `start`."""

    head: bytes
    tail: bytes
    blanks: tuple[tuple[int, int], ...]
    crc: int
    start: int
    tensor: Stored
    nbytes: int


class Patterns:
    """What is known of archives of one tensor each, by their size."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Pattern]] = {}

    def find(self, reader: Reader, start: int, size: int) -> Alike | None:
        """What the archive of `size` bytes at byte `start` holds, if one like it was learnt before."""
        for pattern in self._known.get(size, ()):
            head, tail = pattern.head, pattern.tail
            if reader.read_at(start, len(head)) != head:
                continue
            found = bytearray(reader.read_at(start + size - len(tail), len(tail)))
            crc = int.from_bytes(found[pattern.crc : pattern.crc + 4], "little")
            for low, high in pattern.blanks:
                found[low:high] = bytes(high - low)
            if found == tail:
                offset = start + len(head)
                known = pattern.tensor
                within = known.offset - pattern.start
                tensor = Stored(reader.file, offset + within, known.dtype, known.shape, known.strides)
                return Alike(tensor, Record(offset, pattern.nbytes, crc))
        return None

    def learn(self, reader: Reader, start: int, size: int, tensor: Stored, record: Record) -> None:
        """Keep in mind an archive that was read, and holds `tensor` in its only storage."""
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
    """Where archives that are alike may differ in `tail`, which begins at byte `base`: from where to where, and whether
    it is the checksum of the data at byte `data` in the directory."""
    if len(tail) < _END64_SIZE:
        return
    start = _END64.unpack_from(tail, len(tail) - _END64_SIZE)[-1]
    at = start - base
    while at >= 0 and tail.startswith(b"PK\x01\x02", at):
        entry = _ENTRY.unpack_from(tail, at)
        size, header, name_length = entry[9], entry[16], entry[10]
        name = tail[at + _ENTRY.size : at + _ENTRY.size + name_length]
        crc_at = at + 16
        is_identifier = name.endswith(_IDENTIFIER)
        local = header - base
        if is_identifier and 0 <= local <= len(tail) - _LOCAL.size:
            names, extra = _LOCAL.unpack_from(tail, local)[-2:]
            content = local + _LOCAL.size + names + extra
            yield content, content + size, False
            yield from _descriptor(tail, content + size)
            yield crc_at, crc_at + 4, False
        elif name.endswith(b"/data/0"):
            yield from _descriptor(tail, 0)
            yield crc_at, crc_at + 4, True
        at += _ENTRY.size + sum(entry[10:13])


def _descriptor(tail: bytes, at: int) -> Iterator[tuple[int, int, bool]]:
    """The checksum that follows a member's data."""
    if tail.startswith(_DESCRIPTOR, at):
        yield at + 4, at + 8, False
