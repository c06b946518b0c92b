"""Unpacks values that stores of arrays pack in ways of their own, and checks that these are as their writers make them.

A value is one frame of zstandard, or is followed by its CRC-32C, or is bools, one byte each. tensorstore refuses two
frames in a value, and bools other than 0 and 1; so does this.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from ckptconv.errors import damaged
from ckptconv.features.compressed.crc32c import crc32c
from ckptconv.features.compressed.unpacking import chunks_at, of_damage, zstandard_of
from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File, Packed

# Methods, as `Packed` names them; and the bytes that come out for each byte of a tensor.
FRAME, CRC32C, BOOLS = "zstandard frame", "crc32c", "bools"
UNIT = 1
# Bytes of a CRC-32C.
CRC32C_SIZE = 4
_MAGIC = b"\x28\xb5\x2f\xfd"
# Bytes of the number of a dictionary, and of the content's size, by what a frame's descriptor says.
_DICTIONARY, _CONTENT = (0, 1, 2, 4), (0, 2, 4, 8)
# The kind of a block that is one byte, repeated.
_REPEATED = 1


def unpacked(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Yield the content of a packed file in chunks. Raise CorruptError if it is not as its method requires."""
    if packed.method == FRAME:
        return zstandard_of(file, packed, _one_frame(file, packed, chunks_at(reader, packed)))
    return (_summed if packed.method == CRC32C else _bools)(file, packed, reader)


def _summed(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    size, crc = packed.nbytes - CRC32C_SIZE, 0
    for chunk in chunks_at(reader, packed._replace(nbytes=size)):
        crc = crc32c(chunk, crc)
        yield chunk
    check_crc32c(file.path, crc, reader.read_at(packed.offset + size, CRC32C_SIZE))


def check_crc32c(name: str, crc: int, recorded: bytes) -> None:
    """Raise CorruptError if `recorded` is not the CRC-32C that was computed."""
    if crc != int.from_bytes(recorded, "little"):
        raise damaged(f"{name} has changed: its CRC-32C does not match the recorded one.")


def _bools(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    at = 0
    for chunk in chunks_at(reader, packed):
        if odd := chunk.translate(None, b"\0\1"):
            raise of_damage(file, f"byte {at + chunk.index(odd[0])} of its bools is {odd[0]}, but 0 or 1 was expected")
        yield chunk
        at += len(chunk)


def _one_frame(file: File, packed: Packed, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `chunks`. Raise CorruptError if they go on after the end of their first frame."""
    fields, field, at, end = _fields(), b"", 0, packed.nbytes
    begin, count = next(fields)
    for chunk in chunks:
        while begin + len(field) < at + len(chunk):
            field += chunk[begin + len(field) - at : begin + count - at]
            if len(field) < count:
                break
            try:
                (begin, count), field = fields.send(field), b""
            except StopIteration as stop:
                end, begin, field = stop.value, packed.nbytes, b""
        at += len(chunk)
        if at > end:
            raise of_damage(file, "it is not exactly one zstandard frame")
        yield chunk


def _fields() -> Generator[tuple[int, int], bytes, int]:
    """Yield the place and the size of each field of a frame that says where others are; its bytes are sent. Return
    where the frame ends; 0 if it is none."""
    head = yield 0, 5
    if not head.startswith(_MAGIC):
        return 0
    is_single, is_summed = head[4] >> 5 & 1, head[4] >> 2 & 1
    at = len(head) + (1 - is_single) + _DICTIONARY[head[4] & 3] + (_CONTENT[head[4] >> 6] or is_single)
    is_last = 0
    while not is_last:
        block = int.from_bytes((yield at, 3), "little")
        is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == _REPEATED else size)
    return at + 4 * is_summed
