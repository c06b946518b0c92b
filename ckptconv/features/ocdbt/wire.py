"""Reads the frames and numbers of manifests and nodes of OCDBT.

Source: tensorstore/kvstore/ocdbt/format. A frame is magic bytes, its length, a version, whether zstandard compressed
the body, the body, and the CRC-32C of all that. In a body, the fields of several items are stored by column.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptconv.errors import CorruptError, LimitError, UnsupportedError, damaged
from ckptconv.features.compressed.crc32c import crc32c
from ckptconv.features.compressed.packing import CRC32C_SIZE, FRAME, check_crc32c
from ckptconv.features.compressed.unpacking import content_of
from ckptconv.tensors.moves import File, Packed

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE
# The bytes before a body, and the most bytes of one, which is what Orbax writes. It may unpack to so many times its
# bytes, and some more: keys are similar.
_HEAD, _MOST_BODY, _GROWTH, _ROOM = 14, 100_000_000, 64, 16 << 20
# The most bytes of a word, and of all words of one body; the memory of a word besides its bytes; the most data files in
# one table.
_LONGEST, _MOST_SPELLED, _PER_WORD, _MOST_FILES = 1 << 14, 128 << 20, 128, 1 << 18


class Reference(NamedTuple):
    """A reference to a node: the number of its data file in a table, its offset and length, and the number of keys in
    it or below it."""

    file: int
    offset: int
    length: int
    keys: int


class Body:
    """Reads the body of a frame from its beginning to its end. The body lies in `file`, from byte `start` on; if it is
    compressed, `file` is its unpacked content. `nbytes` is the memory that the body and its words take. `files` is its
    table of data files, once that is read: the path of each, and the directory from which paths in it begin."""

    def __init__(self, file: File, offset: int, data: bytes, magic: int, most: int = _MOST_BODY) -> None:
        """Open the frame `data`, which begins at byte `offset` of `file`, and has a body of at most `most` bytes.

        Raise CorruptError if it is not a frame, or if its checksum or length is wrong.
        """
        self.where = f"{file.path} (node at byte {offset})" if magic == NODE else file.path
        size, length = len(data) - _HEAD - CRC32C_SIZE, int.from_bytes(data[4:12], "little")
        if size < 0 or int.from_bytes(data[:4], "big") != magic:
            raise damaged(f"{self.where} is not an OCDBT file: it begins with {data[:12]!r}.")
        if length != len(data):
            raise damaged(f"{self.where} has {len(data)} bytes, but its header records {length}.")
        check_crc32c(self.where, crc32c(data[:-CRC32C_SIZE]), data[-CRC32C_SIZE:])
        if data[12] or data[13] > 1:
            raise UnsupportedError(
                f"{self.where} has the version {data[12]} and the compression {data[13]}; only version 0 with "
                "compression 0 or 1 is supported."
            )
        self.file, self.start, self.at = file, offset + _HEAD, 0
        self._data = data[_HEAD:-CRC32C_SIZE]
        if data[13]:
            packed = Packed(file, self.start, size, None, FRAME)
            self._data = content_of(self._data, FRAME, self.where, min(most, _GROWTH * size + _ROOM))
            self.file, self.start = File(self.where, len(self._data), file.stamp, packed), 0
        self.nbytes = len(self._data)
        self.files: list[tuple[str, str]] = []

    def wrong(self, why: str) -> CorruptError:
        """Return the error for a body that no writer makes."""
        return damaged(f"{self.where} is damaged: {why}.")

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > len(self._data) - self.at:
            raise self.wrong(f"{count} bytes were expected at byte {self.at} of {len(self._data)}")
        self.at += count
        return self._data[self.at - count : self.at]

    def fixed(self, size: int) -> int:
        """Return the next number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def varint(self) -> int:
        """Return the next number. It has 7 bits in each byte, the low ones first."""
        value = 0
        for shift in range(0, 70, 7):
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise self.wrong(f"the number before byte {self.at} does not end")

    def column(self, count: int) -> list[int]:
        """Return the next `count` numbers, which are no more than the bytes that are left."""
        return [self.varint() for _ in range(count)]

    def words(self, count: int, start: bytes = b"", *, cut: bool) -> tuple[list[bytes], list[int]]:
        """Return `count` words, all of which begin with `start`. The rest of each is stored as the length of its common
        prefix with the rest before it, and what follows. With `cut`, also return the length of the prefix of each word
        that others share."""
        prefixes = [0, *self.column(count - 1)] if count else []
        suffixes = self.column(count)
        cuts = self.column(count) if cut else [0] * count
        words: list[bytes] = []
        word, total = start, 0
        self.nbytes += _PER_WORD * count
        for prefix, suffix, shared in zip(prefixes, suffixes, cuts, strict=True):
            before, word = word, word[: len(start) + prefix] + self.take(suffix)
            total += len(word)
            if len(start) + prefix > len(before) or len(start) + shared > len(word):
                raise self.wrong(
                    f"a word reuses {prefix} bytes of {before[:100]!r}, and shares {shared}, more than exist"
                )
            if len(word) > _LONGEST or total > _MOST_SPELLED:
                raise LimitError(
                    f"{self.where} contains words of {total} bytes in all, one of {len(word)} bytes, which "
                    "exceeds the limit."
                )
            words.append(word)
        self.nbytes += total
        return words, [len(start) + shared for shared in cuts]

    def table(self, base: str) -> None:
        """Read the table of data files, whose paths begin at the directory `base`."""
        count = self.varint()
        if count > _MOST_FILES:
            raise LimitError(f"{self.where} refers to {count} data files; at most {_MOST_FILES} are supported.")
        words, cuts = self.words(count, cut=True)
        try:
            self.files = [
                (base + word.decode(), base + word[:at].decode()) for word, at in zip(words, cuts, strict=True)
            ]
        except UnicodeDecodeError:
            raise self.wrong("the path of a data file is not valid UTF-8") from None

    def references(self, count: int) -> list[Reference]:
        """Return the next `count` references to nodes, without their sums of bytes."""
        columns = [self.column(count) for _ in range(6)]
        return [*map(Reference, *columns[:4])]

    def end(self) -> None:
        """Raise CorruptError if bytes are left."""
        if self.at != len(self._data):
            raise self.wrong(f"{len(self._data) - self.at} bytes follow its end")
