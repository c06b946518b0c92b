"""Read the values of tensors for their statistics: once through, in bounded memory, with the engine's threads."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptconv.engine.checksums import Checksums
from ckptconv.engine.execute import carry_out
from ckptconv.features.reporting.statistics import Moments, Statistics, moments, numbers
from ckptconv.options.table import Options
from ckptconv.plan import Data, FilePlan, Plan
from ckptconv.process import settled
from ckptconv.publish.jobs import packed_in
from ckptconv.storage.files import Readers, is_far
from ckptconv.storage.progress import Progress
from ckptconv.storage.writing import Writer
from ckptconv.tensors.lazy import LazyTensor


def measured(
    tensors: Mapping[str, LazyTensor],
    storage_options: Mapping[str, Any],
    progress: Progress | None = None,
    on_total: Callable[[int], object] | None = None,
) -> tuple[dict[str, Statistics], int]:
    """Read `tensors`. Return the statistics of each whose elements are numbers, by name, and the bytes read.

    `progress` and `on_total` get bytes of tensors, as in a conversion. Raises the errors of reading a file.
    """
    parts: list[Data] = []
    done: dict[str, Statistics] = {}
    at = 0
    for name, tensor in tensors.items():
        values = numbers(tensor)
        if values is not None and values.numel:
            parts.append(Data(at, values, name))
            at += values.nbytes
        elif values is not None:
            done[name] = Moments().statistics()
    if on_total:
        on_total(sum(tensors[part.name].nbytes for part in parts))
    return done, read_through(parts, _Measuring(parts, tensors, done, progress), storage_options)


def read_through(
    parts: Sequence[Data], writer: Writer, storage_options: Mapping[str, Any], checksums: Checksums | None = None
) -> int:
    """Read `parts`, laid out one after the other, for a `writer` that keeps nothing, and compare them with `checksums`.
    Return the bytes read. Raise CorruptError for a checksum that differs."""
    plan = FilePlan("", sum(part.nbytes for part in parts), tuple(parts))
    options = Options()
    with settled(), Readers(dict(storage_options)) as readers:
        packed = packed_in([Plan((plan,), "")])
        if packed:
            readers.expect(packed)
        memory = options.buffers(any(is_far(file.stored.path) for file in plan.inputs()))
        seen = checksums.seen if checksums else None
        tally = carry_out(plan, writer, readers, jobs=options.jobs, memory=memory, seen=seen)
        if checksums:
            checksums.check(readers, [Plan((plan,), "")])
        return tally.bytes_read + readers.bytes_unpacked


class _Measuring(Writer):
    """Takes the bytes of `parts`, laid out one after the other, and keeps their statistics instead of them."""

    positioned = True

    def __init__(
        self,
        parts: list[Data],
        tensors: Mapping[str, LazyTensor],
        done: dict[str, Statistics],
        progress: Progress | None,
    ) -> None:
        self._parts, self._tensors, self._done, self._progress = parts, tensors, done, progress
        self._starts = [part.offset for part in parts]
        # Moments of the tensors that were begun and are not complete.
        self._begun: dict[str, Moments] = {}
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: memoryview) -> None:
        index = bisect.bisect_right(self._starts, offset) - 1
        while data:
            part = self._parts[index]
            length = min(part.offset + part.nbytes - offset, len(data))
            self._take(part.name, data[:length])
            offset, data, index = offset + length, data[length:], index + 1

    def _take(self, name: str, data: memoryview) -> None:
        tensor = self._tensors[name]
        piece = moments(tensor.dtype, data)
        with self._lock:
            begun = self._begun.setdefault(name, piece)
            if begun is not piece:
                begun.add(piece)
            if begun.seen == tensor.numel:
                self._done[name] = self._begun.pop(name).statistics()
        if self._progress:
            self._progress(piece.seen * tensor.dtype.itemsize)
