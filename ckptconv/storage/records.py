"""The records of an archive: offsets, sizes and CRC-32s."""

from __future__ import annotations

import array
import bisect
import zlib
from collections.abc import Sequence
from typing import NamedTuple, overload


class Record(NamedTuple):
    """The bytes of a storage: their offset, their number, and their CRC-32; None if the writer recorded none."""

    offset: int
    size: int
    crc: int | None


class Records(Sequence[Record]):
    """The storages of a container, in the order of the file, in a few bytes each, because there may be a million.

    Compressed ones cannot be read in place and are not included; `packed` holds their CRC-32s.
    """

    def __init__(
        self,
        offsets: array.array[int],
        sizes: array.array[int],
        crcs: array.array[int],
        packed: array.array[int] = array.array("I"),  # noqa: B008
    ) -> None:
        self._offsets, self._sizes, self._crcs, self._packed = offsets, sizes, crcs, packed

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        size, crc = self._sizes[index], self._crcs[index]
        # An archive may be written without checksums: then all are 0.
        return Record(self._offsets[index], size, crc if crc or not size else None)

    def digest(self) -> int | None:
        """Return a number that identifies the contents by their checksums; None if the archive has none."""
        if not any(self._crcs) and not any(self._packed):
            return None
        return zlib.crc32(self._packed.tobytes(), zlib.crc32(self._crcs.tobytes(), zlib.crc32(self._sizes.tobytes())))

    def containing(self, offset: int) -> int | None:
        """Return the index of the record that contains byte `offset` of the file; None if none does."""
        index = bisect.bisect_right(self._offsets, offset) - 1
        return index if index >= 0 and offset < self._offsets[index] + self._sizes[index] else None
