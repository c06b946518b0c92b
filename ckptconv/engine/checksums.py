"""Check the checksums of storages while they are read: `--checksum`.

A zip archive has a CRC-32 for every storage, but torch.load does not check it, nor does any reader of ranges: a flipped
bit goes unnoticed. Here the CRC of every piece read for the output is computed as it was read, before any kernel.
Pieces that cover a whole storage need no further read, in any order. If only a part of a storage is used, the rest is
read at the end.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.plan import Data, Plan
from ckptconv.storage.crc import combine, crc32
from ckptconv.storage.files import Readers
from ckptconv.storage.reading import Reader
from ckptconv.storage.records import Record, Records
from ckptconv.tensors.moves import BLOCK, File, Runs
from ckptconv.text import some

# Shorter runs (bytes), of a transposed tensor, are cheaper to read again in one piece than to digest one by one.
_WORTH_DIGESTING = 4096
# Number of tensors in a damaged storage to name.
_NAMED = 3


class Span(NamedTuple):
    """Bytes `start` to `stop` of a storage, and their CRC-32."""

    start: int
    stop: int
    crc: int


@dataclass(eq=False, repr=False)
class _Used:
    """A storage that was read from. `spans` are its digested bytes: disjoint, not touching, in order."""

    file: File
    record: Record
    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Add a span, unless it overlaps another: those bytes were read twice, or will be at the end."""
        at = bisect.bisect_left(self.spans, span.start, key=lambda known: known.start)
        if at and self.spans[at - 1].stop > span.start:
            return
        if at < len(self.spans) and self.spans[at].start < span.stop:
            return
        if at < len(self.spans) and self.spans[at].start == span.stop:
            span = _joined(span, self.spans.pop(at))
        if at and self.spans[at - 1].stop == span.start:
            self.spans[at - 1] = _joined(self.spans[at - 1], span)
        else:
            self.spans.insert(at, span)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the (start, stop) of the bytes that are not digested."""
        stops = [0, *(span.stop for span in self.spans)]
        starts = [*(span.start for span in self.spans), self.record.size]
        return [(start, stop) for start, stop in zip(stops, starts, strict=True) if start < stop]


def _joined(first: Span, second: Span) -> Span:
    pieces = ((span.start, span.stop - span.start, span.crc) for span in (first, second))
    return Span(first.start, second.stop, combine(pieces))


class Checksums:
    """The checksums of the storages that a conversion reads from. `records` are all storages, by path of their file.

    `seen` may be called from any thread. `extra_bytes` counts the bytes read only for checksums. `unrecorded` has the
    files that were read where they record no checksum.
    """

    def __init__(self, records: Mapping[str, Records]) -> None:
        self.extra_bytes = 0
        self.unrecorded: dict[str, None] = {}
        self.records = records
        # By path, one byte for each record: whether the storage was read in one piece and is right. There may be a
        # million.
        self._right = {path: bytearray(len(spans)) for path, spans in records.items()}
        # The other storages that were read, by path and index of the record.
        self._used: dict[tuple[str, int], _Used] = {}
        self._elsewhere = 0
        self._lock = threading.Lock()

    @property
    def checked(self) -> int:
        """The number of storages with a checksum that were read."""
        return sum(map(sum, self._right.values())) + len(self._used) + self._elsewhere

    def include(self, checked: int, extra_bytes: int, unrecorded: Iterable[str]) -> None:
        """Add the counts of another process."""
        self._elsewhere += checked
        self.extra_bytes += extra_bytes
        self.unrecorded.update(dict.fromkeys(unrecorded))

    def seen(self, file: File, source: Runs, data: memoryview) -> None:
        """Add the bytes `data`, read from the runs `source` of `file`, to the checksums."""
        if source.grid and source.length < _WORTH_DIGESTING:
            # A move reads from only one storage: mark it as used, to be read at the end.
            self._note(file, source.offset, data[:0])
            return
        at = 0
        for offset in source.offsets():
            self._note(file, offset, data[at : at + source.length])
            at += source.length

    def _note(self, file: File, offset: int, data: memoryview) -> None:
        if file.packed is not None:
            return  # its checksum was checked when it was unpacked
        records = self.records.get(file.path)
        index = records.containing(offset) if records else None
        if records is None or index is None or records[index].crc is None:
            self.unrecorded[file.path] = None
            return
        record, right = records[index], self._right[file.path]
        if right[index]:
            return
        start = offset - record.offset
        part = data[: record.size - start]
        span = Span(start, start + len(part), crc32(part))
        with self._lock:
            if span == (0, *record[1:]):
                self._used.pop((file.path, index), None)
                right[index] = True
                return
            used = self._used.setdefault((file.path, index), _Used(file, record))
            if part:
                used.add(span)

    def check(self, readers: Readers, plans: Iterable[Plan]) -> None:
        """Read the missing bytes, and raise CorruptError for a storage whose CRC-32 is not the recorded one.

        `plans` are those that the data was read for; the error names their tensors in the storage.
        """
        for used in self._used.values():
            with readers.reading(used.file) as reader:
                for start, stop in used.gaps():
                    used.add(Span(start, stop, self._digest(reader, used.record.offset + start, stop - start)))
            if used.spans[0].crc != used.record.crc:
                raise _damaged(used, plans)

    def _digest(self, reader: Reader, offset: int, length: int) -> int:
        self.extra_bytes += length
        crc = 0
        for at in range(0, length, BLOCK):
            crc = crc32(reader.read_at(offset + at, min(BLOCK, length - at)), crc)
        return crc


def _damaged(used: _Used, plans: Iterable[Plan]) -> CorruptError:
    file, record = used.file, used.record
    names = list(dict.fromkeys(name for plan in plans for name in _reading(plan, used)))
    tensors = some(names, _NAMED, repr) or "a tensor"
    return CorruptError(
        f"{file.path}: the data of {tensors} has changed since it was written: the CRC-32 of bytes "
        f"{record.offset} to {record.offset + record.size} is {used.spans[0].crc:08x}, but the archive records "
        f"{record.crc:08x}.",
        "Copy or download the file again.",
    )


def _reading(plan: Plan, used: _Used) -> Iterator[str]:
    """Yield the names of the tensors that read from a storage."""
    start, stop = used.record.offset, used.record.offset + used.record.size
    for file in plan.files:
        for part in file.parts:
            if isinstance(part, Data) and used.file in part.tensor.inputs():
                for move in part.tensor.moves(0, part.tensor.nbytes):
                    if move.file == used.file and isinstance(move.source, Runs) and start <= move.source.offset < stop:
                        yield part.name
                        break
