"""The buffer of one thread, and what it reads and writes: in few calls, and counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from ckptconv.storage.files import MAX_BUFFERS, Readers, is_read_far
from ckptconv.storage.writing import Writer
from ckptconv.tensors.moves import GAP, File, Runs
from ckptconv.text import some

if TYPE_CHECKING:
    from ckptconv.engine.crcs import Crcs
    from ckptconv.storage.reading import Sources

# Called with everything that is read for the output: the file, the runs in it, and their bytes.
Seen: TypeAlias = Callable[[File, Runs, memoryview], None]


@dataclass(eq=False, repr=False)
class Tally:
    """Counts for the execution of a plan: bytes read, written and verified. `lost_in` counts lost values by their
    result ("infinite", "zero", "nan") and by tensor."""

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_verified: int = 0
    lost_in: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, other: Tally) -> None:
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.bytes_verified += other.bytes_verified
        for became, counts in other.lost_in.items():
            self.lost_in[became].update(counts)

    def lost(self, dtype: str) -> dict[str, str]:
        """Return warnings about the values that became "infinite" or "zero" in a cast to `dtype`, and about "nan" sums.

        It names the tensors with most of them first.
        """
        warnings = {}
        for became, counts in self.lost_in.items():
            values, where = _summed(counts)
            warnings[became] = {
                "infinite": f"{values} too large for {dtype} and became infinite, in {where}.",
                "zero": f"{values} too small for {dtype} and became zero, in {where}.",
                "nan": f"{values} NaN after the inputs were added, in {where}; `ckptconv inspect --stats` finds the "
                "inputs that have NaN.",
            }[became]
        return warnings


def _summed(counts: Mapping[str, int]) -> tuple[str, str]:
    """Return the number of values, and the tensors with most of them, in words."""
    total = sum(counts.values())
    names = sorted(counts.keys() - {""}, key=lambda name: (-counts[name], name))
    return "1 value was" if total == 1 else f"{total:,} values were", some(names, 3) or "a tensor"


class Buffers:
    """A buffer of `unit` bytes, the size of a window, in which a thread puts together its output."""

    def __init__(
        self, readers: Sources, writer: Writer | None, unit: int, digesting: bool = False, seen: Seen | None = None
    ) -> None:
        self.readers, self.writer, self.unit, self.seen = readers, writer, unit, seen
        self.fetches = not isinstance(readers, Readers)
        self.crcs = _new_crcs() if digesting else None
        self.window = memoryview(bytearray(unit))
        self.junk = memoryview(bytearray(GAP))
        self.tally = Tally()
        self.name = ""  # of the tensor that is being made
        # The offsets of the trailers that were written.
        self.trailers: set[int] = set()

    def read(self, file: File, ranges: list[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset; read across small gaps instead of starting another read."""
        ranges.sort(key=itemgetter(0))
        skipped = self.junk
        with self.readers.reading(file) as reader:
            begin = end = ranges[0][0]
            buffers: list[memoryview] = []
            for offset, to in ranges:
                gap = offset - end
                if gap < 0 or gap > GAP or len(buffers) > MAX_BUFFERS - 2:
                    reader.fill(begin, buffers)
                    self.count(file, end - begin)
                    begin, buffers = offset, []
                elif gap:
                    if gap != len(skipped):
                        skipped = self.junk[:gap]
                    buffers.append(skipped)
                buffers.append(to)
                end = offset + len(to)
            reader.fill(begin, buffers)
            self.count(file, end - begin)
        if self.seen:
            for offset, to in ranges:
                self.seen(file, Runs(offset, len(to)), to)

    def count(self, file: File, size: int) -> None:
        """Count `size` bytes that were read of `file`."""
        # Packed and remote data was counted when it was unpacked or fetched.
        if file.packed is None and not (self.fetches and is_read_far(file)):
            self.tally.bytes_read += size

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset` of the output file."""
        assert self.writer is not None
        self.writer.write_at(offset, data)


def _new_crcs() -> Crcs:
    from ckptconv.engine.crcs import Crcs  # most single files need none

    return Crcs()
