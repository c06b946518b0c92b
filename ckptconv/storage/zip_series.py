"""Members of a zip archive that are alike: stored, one after the other, named by numbers of as many digits.

Those of one directory make most of an archive of many tensors. Their records differ in a few bytes, and are compared
byte by byte for all of them at once: a column is what they have at one place.
"""

from __future__ import annotations

import array
import sys
from typing import NamedTuple

from ckptconv.storage.zip_directory import ENTRY, ENTRY_SIGNATURE, LOCAL_HEADER, ZIP64

# Bytes of an entry of the directory that are the same in all of them: signature, flags, method; lengths of the name,
# the extra fields and the comment, disk; and the byte of the attributes that marks a directory.
_SAME_IN_ENTRIES = (*range(4), *range(8, 12), *range(28, 36), 38)
_IS_DIRECTORY = 0x10
# Bytes of a local header that are: all but its time and its checksum.
_SAME_IN_HEADERS = (*range(10), *range(18, LOCAL_HEADER.size))
_CRC, _PACKED, _SIZE, _HEADER = 16, 20, 24, 42
_LOCAL_CRC, _LOCAL_SIZES = 14, 18


class Series(NamedTuple):
    """Rows `first` to `stop`, whose names are `head`, which ends in a slash, and `digits` digits."""

    head: str
    digits: int
    first: int
    stop: int


class Alike(NamedTuple):
    """What entries of the directory have that are alike. `head`: that of a series, or "" if their names make none."""

    names: list[str]
    head: str
    flags: int
    crcs: array.array[int]
    sizes: array.array[int]
    headers: array.array[int]


def entries_alike(block: bytes, size: int) -> Alike | None:
    """Return what the entries in `block` have, each of `size` bytes; None unless they are stored, have ASCII names, and
    say nothing that may have to be refused or explained."""
    count, first = len(block) // size, block[:size]
    signature, _, _, flags, method, *_, name_length, extra, comment, disk, _, attributes, _ = ENTRY.unpack_from(first)
    if signature != ENTRY_SIGNATURE or ENTRY.size + name_length != size or attributes & _IS_DIRECTORY:
        return None
    if method or extra or comment or disk or not name_length or not _are_same(block, size, count, _SAME_IN_ENTRIES):
        return None
    if any(block[_PACKED + at :: size] != block[_SIZE + at :: size] for at in range(4)):
        return None
    sizes, headers = _numbers("Q", block, _SIZE, size, count), _numbers("Q", block, _HEADER, size, count)
    if ZIP64 in sizes or ZIP64 in headers:
        return None
    text = bytearray(count * name_length)
    for at in range(name_length):
        text[at::name_length] = block[ENTRY.size + at :: size]
    if not text.isascii() or b"/" in text[name_length - 1 :: name_length]:
        return None
    head = first[ENTRY.size : first.rfind(b"/") + 1]
    places = range(ENTRY.size, ENTRY.size + len(head))
    is_series = head and _are_same(block, size, count, places)
    is_series = is_series and all(text[at::name_length].isdigit() for at in range(len(head), name_length))
    together = text.decode("ascii")
    names = [together[at : at + name_length] for at in range(0, len(together), name_length)]
    crcs = _numbers("I", block, _CRC, size, count)
    return Alike(names, head.decode() if is_series else "", flags, crcs, sizes, headers)


def headers_alike(window: bytes | bytearray, distance: int, names: list[str], crcs: array.array[int]) -> bool:
    """Whether the local headers that `window` has from its first byte on, `distance` bytes from one to the next, are
    like the first one but for what they must not share: their `names`, which are of one length, and their checksums,
    which are `crcs`, or are not there."""
    count, length = len(names), len(names[0])
    end = (count - 1) * distance + 1
    head, text = LOCAL_HEADER.size, "".join(names).encode()
    numbers = _numbers("I", window, _LOCAL_CRC, distance, count)
    return (
        _are_same(window, distance, count, _SAME_IN_HEADERS)
        and b"\xff\xff\xff\xff" not in (window[_LOCAL_SIZES : _LOCAL_SIZES + 4], window[_LOCAL_SIZES + 4 : head - 4])
        and (numbers == crcs or not any(numbers))
        and all(window[head + at : head + at + end : distance] == text[at::length] for at in range(length))
    )


def _are_same(data: bytes | bytearray, step: int, count: int, places: tuple[int, ...] | range) -> bool:
    """Whether `count` records, `step` bytes from one to the next, have the same at all `places`."""
    end = (count - 1) * step + 1
    return all(data[at : at + end : step] == data[at : at + 1] * count for at in places)


def _numbers(code: str, data: bytes | bytearray, at: int, step: int, count: int) -> array.array[int]:
    """Return the numbers of four bytes at byte `at` of each of `count` records."""
    numbers, end = array.array(code, bytes(array.array(code).itemsize * count)), (count - 1) * step + 1
    view = memoryview(numbers).cast("B")
    for byte in range(4):
        place = byte if sys.byteorder == "little" else numbers.itemsize - 1 - byte
        view[place :: numbers.itemsize] = data[at + byte : at + byte + end : step]
    view.release()
    return numbers
