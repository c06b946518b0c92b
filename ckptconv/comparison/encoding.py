"""Encode what changed in tensors, as a delta holds it: block by block, in bounded memory, into a temporary file.

The size of what is encoded is known only afterwards, and the header of a file begins with sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.comparison.reading import Pair
from ckptconv.engine.execute import in_threads
from ckptconv.engine.together import blocks_of
from ckptconv.errors import UnsupportedError
from ckptconv.formats.delta import MOST_OVERWRITTEN, OVERWRITE
from ckptconv.options.table import Options
from ckptconv.process import settled
from ckptconv.storage.digests import hasher
from ckptconv.storage.files import DescriptorReader, is_far
from ckptconv.storage.overwriting import CHANGE, NUMBER
from ckptconv.storage.progress import Progress
from ckptconv.storage.spool import Spool, SpoolingReaders
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import Concat, LazyTensor, Stored, packed
from ckptconv.tensors.moves import File
from ckptconv.text import install

# Bytes of a tensor that are encoded at a time; of compressed data that are collected before they are written.
_STEP, _LEAST_STEP, _COLLECTED = 1 << 18, 1 << 14, 1 << 18
# A thread has so many buffers of a step.
_BUFFERS = 8
_MOST_JOBS = 4
# Fast, and what a step changes hardly compresses better.
_LEVEL = 1
_U8 = DTYPES["uint8"]


class Places(NamedTuple):
    """Where the payload of a tensor is in the spool, as (offset, bytes), and the checksum of the new tensor."""

    runs: Sequence[tuple[int, int]]
    checksum: str

    def payload(self, file: File) -> LazyTensor:
        """Return the payload, as bytes of the spool's file."""
        parts = tuple(Stored(file, start, _U8, (length,), (1,)) for start, length in self.runs)
        return parts[0] if len(parts) == 1 else Concat(parts)


def encoded(
    pairs: Sequence[Pair],
    encoding: str,
    checksum: str,
    options: Options,
    spool: Spool,
    progress: Progress | None = None,
) -> list[Places]:
    """Encode what each pair changes, compressed, into `spool`. `progress` gets the bytes of both sides.

    `check_installed` tells whether it can be done.
    """
    numpy_module()
    tensors = [tensor for pair in pairs for tensor in (pair.one, pair.other)]
    far = any(is_far(file.stored.path) for tensor in tensors for file in tensor.inputs())
    jobs = 1 if far else min(options.jobs or min(os.cpu_count() or 1, _MOST_JOBS), max(len(pairs), 1))
    step = min(_STEP, max(options.buffers(far) // jobs // _BUFFERS, _LEAST_STEP))
    found: list[Places | None] = [None] * len(pairs)
    with settled(), SpoolingReaders(dict(options.storage_options), options.spool_dir) as readers:
        readers.expect(packed(tensors))
        workers = [_Encoder(readers, spool, encoding, checksum, step, found) for _ in range(jobs)]
        in_threads(iter(enumerate(pairs)), workers, progress)
    return [each for each in found if each is not None]


class _Encoder:
    """Encodes one pair after the other, and puts each result into `found`."""

    def __init__(
        self,
        readers: SpoolingReaders,
        spool: Spool,
        encoding: str,
        checksum: str,
        step: int,
        found: list[Places | None],
    ) -> None:
        self._readers, self._spool, self._found = readers, spool, found
        self._encoding, self._checksum, self._step = encoding, checksum, step

    def run(self, task: tuple[int, Pair]) -> int:
        """Encode one pair. Return the bytes read."""
        number, pair = task
        hashing = hasher(self._checksum)

        def blocks() -> Iterator[tuple[memoryview, memoryview]]:
            for one, other in blocks_of((pair.one, pair.other), self._readers, self._step):
                hashing.update(other)
                yield one, other

        encode = self._overwriting if self._encoding == OVERWRITE else self._xor
        runs = encode(blocks(), pair.one.nbytes)
        self._found[number] = Places(runs, hashing.hexdigest())
        return pair.nbytes

    def _xor(self, blocks: Iterator[tuple[memoryview, memoryview]], size: int) -> list[tuple[int, int]]:
        np = numpy_module()
        made = _Compressed(self._spool, size)
        for one, other in blocks:
            made.add(np.bitwise_xor(np.frombuffer(one, "u1"), np.frombuffer(other, "u1")).data)
        return made.finish()

    def _overwriting(self, blocks: Iterator[tuple[memoryview, memoryview]], _: int) -> list[tuple[int, int]]:
        """Positions come before values, and their number before both: keep them in the spool until all are known."""
        np = numpy_module()
        positions, values = _Kept(self._spool), _Kept(self._spool)
        at = 0
        for one, other in blocks:
            before, after = np.frombuffer(one, "u1"), np.frombuffer(other, "u1")
            (changed,) = np.nonzero(before != after)
            positions.add((changed + at).astype("<u4").tobytes())
            values.add(after[changed].tobytes())
            at += len(one)
        made = _Compressed(self._spool, NUMBER + CHANGE * values.nbytes)
        made.add(values.nbytes.to_bytes(NUMBER, "little"))
        for kept in (positions, values):
            for data in kept.taken():
                made.add(data)
        return made.finish()


class _Kept:
    """Bytes that are put into a spool and taken from it once."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._runs: list[tuple[int, int]] = []
        self.nbytes = 0

    def add(self, data: bytes) -> None:
        if data:
            start = self._spool.room(len(data))
            self._spool.write_at(start, data)
            self._runs.append((start, len(data)))
            self.nbytes += len(data)

    def taken(self) -> Iterator[bytes]:
        reader = DescriptorReader(File("a temporary file", 0), self._spool.descriptor)
        for start, size in self._runs:
            data = bytearray(size)
            reader.fill(start, [memoryview(data)])
            yield bytes(data)
            self._spool.give_back(start, size)


class _Compressed:
    """One frame of zstandard of `size` bytes, which the frame tells: readers allocate as much."""

    def __init__(self, spool: Spool, size: int) -> None:
        self._frame = _zstandard().ZstdCompressor(level=_LEVEL).compressobj(size=size)
        self._spool = spool
        self._collected = bytearray()
        self._runs: list[tuple[int, int]] = []

    def add(self, data: bytes | memoryview) -> None:
        self._collected += self._frame.compress(data)
        if len(self._collected) >= _COLLECTED:
            self._write()

    def finish(self) -> list[tuple[int, int]]:
        """End the frame. Return where it is: offsets and lengths, in order."""
        self._collected += self._frame.flush()
        self._write()
        return self._runs

    def _write(self) -> None:
        start, size = self._spool.room(len(self._collected)), len(self._collected)
        self._spool.write_at(start, bytes(self._collected))
        self._collected.clear()
        if self._runs and sum(self._runs[-1]) == start:
            start, size = self._runs[-1][0], self._runs.pop()[1] + size
        self._runs.append((start, size))


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UnsupportedError(
            "A delta is compressed with zstandard, for which a package is not installed.", install("zstd")
        ) from None
    return zstandard


def check_installed(checksum: str) -> None:
    """Raise UsageError if the package for `checksum` is not installed, UnsupportedError if zstandard is not."""
    hasher(checksum)
    _zstandard()


def check_encodable(pairs: Mapping[str, Pair], encoding: str) -> None:
    """Raise UnsupportedError for a tensor with more bytes than a position of `encoding` can count."""
    for name, pair in pairs.items():
        if encoding == OVERWRITE and pair.one.nbytes > MOST_OVERWRITTEN:
            raise UnsupportedError(
                f"{name!r} has {pair.one.nbytes} bytes, and positions in a delta that overwrites count to "
                f"{MOST_OVERWRITTEN}. No delta was written.",
                "Choose the other encoding: --delta-encoding xor.",
            )
