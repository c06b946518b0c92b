"""The ends of entries that are compressed, and of unknown size: few checkpoints have such entries."""

from __future__ import annotations

from typing import NamedTuple

from ckptconv.errors import LimitError
from ckptconv.storage.crc import crc32
from ckptconv.storage.packed import unpacking
from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File


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
            raise LimitError(f"{file.path} is damaged: it unpacks to more than {most} bytes, the limit.")
        crc = crc32(data, crc)
        head += data[: max(keep - len(head), 0)]
        tail = (tail + data)[-max(keep, len(data)) :]
    return Ends(size, crc, bytes(head), tail)
