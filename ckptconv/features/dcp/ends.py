"""The ends of entries that are compressed, and of unknown size: few checkpoints have such entries."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from ckptconv.errors import LimitError, UnsupportedError, damaged
from ckptconv.storage.crc import combine, crc32
from ckptconv.storage.packed import unpacking
from ckptconv.storage.reading import Reader
from ckptconv.storage.records import Records
from ckptconv.tensors.moves import File, Packed


class Ends(NamedTuple):
    """Facts of an unpacked file: its size, its CRC-32, and its first and last bytes."""

    size: int
    crc: int
    head: bytes
    tail: bytes


def ends_of(file: File, reader: Reader, keep: int, most: int) -> Ends:
    """Unpack a packed file of unknown size, and keep `keep` bytes of either end (a little more of the tail).

    Raises LimitError if it has more than `most` bytes, CorruptError if it cannot be unpacked.
    """
    assert file.packed is not None
    head, tail = bytearray(), b""
    size = crc = 0
    for data in unpacking(file.path).UNPACKING[file.packed.method](file, file.packed, reader):
        size += len(data)
        if size > most:
            raise LimitError(f"{file.path} is damaged: it unpacks to more than {most} bytes, which is the limit.")
        crc = crc32(data, crc)
        head += data[: max(keep - len(head), 0)]
        tail = (tail + data)[-max(keep, len(data)) :]
    return Ends(size, crc, bytes(head), tail)


class EndsReader(Reader):
    """An unpacked entry of which only the beginning and the end are known: `nbytes` bytes at `offset` of the file of
    `reader`. It keeps and has at most as many bytes as `ends_of` says."""

    def __init__(self, reader: Reader, offset: int, nbytes: int, keep: int, most: int) -> None:
        packed = Packed(reader.file, offset, nbytes, None, "zstandard")
        file = File(f"{reader.file.path} (entry at byte {offset})", 0, reader.file.stamp, packed)
        ends = ends_of(file, reader, keep, most)
        self.file = file._replace(size=ends.size, packed=packed._replace(crc=ends.crc))
        self._head, self._tail = ends.head, ends.tail

    def read_at(self, offset: int, length: int) -> bytes:
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        start = self.file.size - len(self._tail)
        if offset >= start and offset + length <= self.file.size:
            return self._tail[offset - start : offset - start + length]
        raise UnsupportedError(f"{self.file.path} contains more than one tensor, and is compressed.")


def check_packed(archive: Reader, records: Records) -> None:
    """Raise CorruptError if the checksums of a decompressed archive's storages are wrong.

    The data itself was not kept. But its checksum and those of the bytes around it, combined, must be that of all.
    """
    at, parts = 0, []
    for record in records:
        if record.crc is None:
            return
        before = archive.read_at(at, record.offset - at)
        parts += [(at, len(before), zlib.crc32(before)), (record.offset, record.size, record.crc)]
        at = record.offset + record.size
    after = archive.read_at(at, archive.file.size - at)
    parts.append((at, len(after), zlib.crc32(after)))
    assert archive.file.packed is not None
    if combine(part for part in parts if part[1]) != archive.file.packed.crc:
        raise damaged(f"{archive.file.path}: the tensor does not match its checksum: its data has changed.")
