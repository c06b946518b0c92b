"""Content digests of a file and of ranges of it, sha256 or blake3, computed while the file is written.

Such a digest can only be computed from the first byte to the last, and a local file is written in any order. So threads
follow the writers: they read back the bytes that are complete from the beginning of the file on, while they are in the
page cache. A file on a store is written in order, and is digested on its way.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ckptconv.errors import UsageError, damaged
from ckptconv.process import Thread, start_threads
from ckptconv.storage.crc import adler32
from ckptconv.storage.reading import Reader
from ckptconv.storage.writing import Writer
from ckptconv.text import install

# Bytes to read at a time.
READ = 1 << 20
# An offset after every byte of a file.
_NEVER = 1 << 64
# Offset, size in bytes, and name. The ranges of a file do not overlap.
NamedRange: TypeAlias = tuple[int, int, str]


@dataclass
class Digests:
    """The digests of a file, in hex, by one of `ALGORITHMS` of the options: its own, and those of its tensors by name.

    Of a file that is being written, they are empty until it is sealed.
    """

    algorithm: str
    file: str = ""
    tensors: dict[str, str] = field(default_factory=dict)


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: bytes | memoryview) -> None:
        self._value = adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


# Algorithms that need no package; and for the others: the package, which has an extra of its name, and its function.
_BUILT_IN: Mapping[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "adler32": _Adler32}
_PACKAGED = {"blake3": ("blake3", "blake3"), "xxh3-128": ("xxhash", "xxh3_128")}


def hasher(algorithm: str) -> Any:
    """Return a new hash object of an `algorithm`, such as "xxh3-128" or "adler32", with `update` and `hexdigest`.

    Raises UsageError if its package is not installed.
    """
    if algorithm in _BUILT_IN:
        return _BUILT_IN[algorithm]()
    package, name = _PACKAGED[algorithm]
    try:
        return getattr(importlib.import_module(package), name)()
    except ImportError:
        raise UsageError(
            f"Digests by {algorithm} need the package {package}, which is not installed.", install(package)
        ) from None


def digests_of(
    read_at: Callable[[int, int], bytes], size: int, ranges: Iterable[NamedRange], algorithm: str
) -> Digests:
    """Return the digests of a file of `size` bytes and of `ranges` of it. `read_at(offset, length)` reads it."""
    hashings = _whole(size, algorithm), _Hashing(sorted(ranges), algorithm)
    for at in range(0, size, READ):
        data = memoryview(read_at(at, min(READ, size - at)))
        for hashing in hashings:
            hashing.update(data)
    whole, of_ranges = hashings
    return Digests(algorithm, whole.complete[""], of_ranges.complete)


def digest_of(reader: Reader, algorithm: str, progress: Callable[[int], object] | None = None) -> str:
    """Return the digest of a whole file. `progress` is called with the bytes read since the last call."""

    def read_at(offset: int, length: int) -> bytes:
        data = reader.read_at(offset, length)
        if progress:
            progress(length)
        return data

    return digests_of(read_at, reader.file.size, (), algorithm).file


def check_digest(path: str, actual: str, stated: str) -> None:
    """Raise CorruptError if the SHA-256 of a file is not the stated one."""
    if actual != stated:
        raise damaged(
            f"{path} has the SHA-256 {actual}, but its checkpoint records {stated}: the file was changed or damaged."
        )


class _Hashing:
    """Computes the digests of `ranges` of a file whose bytes come in order, as the ranges do. There may be a million.

    `complete` has the finished ones.
    """

    def __init__(self, ranges: Iterable[NamedRange], algorithm: str) -> None:
        self.complete: dict[str, str] = {}
        self._ranges, self._algorithm, self._at = iter(ranges), algorithm, 0
        self._begin()

    def _begin(self) -> None:
        """Begin the next range. Those without bytes are complete at once."""
        for offset, nbytes, name in self._ranges:
            self._hash = hasher(self._algorithm)
            if nbytes:
                self._start, self._stop, self._name = offset, offset + nbytes, name
                return
            self.complete[name] = self._hash.hexdigest()
        self._start = self._stop = _NEVER

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        start, stop = self._at, self._at + len(data)
        self._at = stop
        while self._start < stop:
            self._hash.update(data[max(self._start, start) - start : min(self._stop, stop) - start])
            if self._stop > stop:
                return
            self.complete[self._name] = self._hash.hexdigest()
            self._begin()


def _whole(size: int, algorithm: str) -> _Hashing:
    return _Hashing([(0, size, "")], algorithm)


class DigestingWriter(Writer):
    """Writes a file of `size` bytes with `writer`, and computes its digests and those of `ranges` of it, in order.

    Call `start` before the first byte, and `finish` when all is written, or `give_up`. If `writer` is positioned, two
    threads read the written bytes back, one for the digest of the file and one for those of its ranges.
    """

    def __init__(self, writer: Writer, size: int, ranges: Iterable[NamedRange], algorithm: str) -> None:
        self.positioned = writer.positioned
        # Filled in by `finish`.
        self.digests = Digests(algorithm)
        self._writer, self._size = writer, size
        self._hashings = _whole(size, algorithm), _Hashing(ranges, algorithm)
        # Blocks of `READ` bytes: how many are complete from the beginning on, and the bytes written of later ones.
        self._complete, self._written = 0, Counter[int]()
        self._all_written = self._given_up = False
        # Entered itself: `with` on the condition leaves it held if a signal comes at the wrong moment.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failures: list[BaseException] = []
        self._threads: list[Thread] = []

    def start(self) -> None:
        """Start to follow the written bytes."""
        if self.positioned and self._size > READ:
            self._threads = [Thread(partial(self._follow, hashing)) for hashing in self._hashings]
            self._threads = start_threads(self._threads)

    def write_at(self, offset: int, data: memoryview) -> None:
        self._writer.write_at(offset, data)
        if not self.positioned:
            for hashing in self._hashings:
                hashing.update(data)
        else:
            self._count(_by_block(offset, len(data)))

    def write_runs(self, offsets: Iterable[int], length: int, data: memoryview) -> None:
        if not self.positioned:
            super().write_runs(offsets, length, data)  # by `write_at`
            return
        written = Counter[int]()

        def counted() -> Iterator[int]:
            for offset in offsets:
                for block, count in _by_block(offset, length):
                    written[block] += count
                yield offset

        self._writer.write_runs(counted(), length, data)
        self._count(written.items())

    def read_at(self, offset: int, length: int) -> bytes:
        return self._writer.read_at(offset, length)

    def _count(self, written: Iterable[tuple[int, int]]) -> None:
        """Count the written bytes, which come as (block, bytes)."""
        with self._lock:
            for block, count in written:
                self._written[block] += count
            before = self._complete
            while self._written[self._complete] >= READ:
                del self._written[self._complete]
                self._complete += 1
            if self._complete > before:
                self._changed.notify_all()

    def _follow(self, hashing: _Hashing) -> None:
        """Digest the file from its first byte to its last, each block once it is written."""
        try:
            for block, at in enumerate(range(0, self._size, READ)):
                with self._lock:
                    while not (self._complete > block or self._all_written or self._given_up):
                        self._changed.wait()
                if self._given_up:
                    return
                hashing.update(memoryview(self._writer.read_at(at, min(READ, self._size - at))))
        except BaseException as error:
            self._failures.append(error)

    def finish(self) -> None:
        """Compute the rest, and fill in `digests`. The file is completely written, and not closed yet."""
        with self._lock:
            self._all_written = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self.positioned:
            # Small files, and where the system allows no more threads.
            for hashing in self._hashings[len(self._threads) :]:
                self._follow(hashing)
        if self._failures:
            raise self._failures[0]
        whole, of_ranges = self._hashings
        self.digests.file, self.digests.tensors = whole.complete[""], of_ranges.complete

    def give_up(self) -> None:
        """End the threads, because the file will not be complete."""
        with self._lock:
            self._given_up = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()


def _by_block(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the blocks that contain the `length` bytes at `offset`, each with the number of these bytes in it."""
    stop = offset + length
    while offset < stop:
        block = offset // READ
        end = min((block + 1) * READ, stop)
        yield block, end - offset
        offset = end
