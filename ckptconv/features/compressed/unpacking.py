"""Unpack compressed records of archives, and other data that is stored in another form than it is read.

A compressed record cannot be read by ranges. It is unpacked when the first of its bytes is requested, and not at all if
none is.
"""

from __future__ import annotations

import io
import os
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import import_module

from ckptconv.errors import CorruptError, LimitError, UnsupportedError
from ckptconv.storage.buffered import InMemory
from ckptconv.storage.crc import crc32
from ckptconv.storage.files import DescriptorReader, Readers
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import install

# Bytes that are read, and unpacked, at a time; and bytes of a request for a remote file.
CHUNK = 1 << 17
_FAR_CHUNK = 1 << 22
# Bytes of the largest window that a frame of zstandard may ask for: that of levels up to 20.
_MOST_WINDOW = 1 << 25
# Ranges of a packed file, passed over when it was unpacked, that are kept one by one.
MOST_KEPT = 64
# Files that are unpacked as they are read, at once: each holds a window of zstandard, often 2 MiB.
_MOST_STREAMED = 16


class Contents:
    """The contents of packed files, for several threads: in a spool, or as they are read.

    The room of an unpacked file is given back once as many bytes were read as the readers expect, or as the file has if
    that is more. If more are read, it is unpacked again, which costs no more than the reads did. `nbytes` counts the
    packed bytes that were read. A file that is read once, in order, and has no checksum to be compared before, is
    unpacked as it is read, unless many are already; only ranges that are passed over are kept in the spool. A copy of
    the process has a spool of its own.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers, self._spool = readers, readers.spool
        self.nbytes = 0
        self._contents: dict[File, _Content] = {}
        self._streamed: set[File] = set()
        self._table = threading.Lock()
        self._process = os.getpid()

    def reader_of(self, file: File) -> Reader:
        """Return a reader of a packed file's content."""
        return _PackedReader(file, self)

    def fill(self, file: File, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from `offset` of a packed file's content, which is unpacked first if the spool lacks it."""
        assert file.packed is not None
        with self._table:
            if self._process != os.getpid():
                self._spool, self._contents, self._streamed = self._readers.spool, {}, set()
                self._process, self.nbytes = os.getpid(), 0
            content = self._contents.setdefault(file, _Content())
        nbytes = sum(map(len, buffers))
        with content.lock:
            if content.start < 0:
                content.left = max(file.size, self._readers.expected.get(file, 0))
                content.start = self._spool.room(file.size)
                self._unpack_anew(file, content, to=0 if self._begins_stream(file) else file.size)
            is_next = offset >= content.unpacking.at and len(content.kept) < MOST_KEPT
            if is_next:
                self._keep(content, offset)
                for buffer in buffers:
                    content.unpacking.into(buffer)
            elif not content.has(offset, offset + nbytes):
                self._unpack_anew(file, content, to=file.size)
            if content.unpacking.at == file.size:
                self._streamed.discard(file)
            content.users += 1
        try:
            if not is_next:
                DescriptorReader(file, self._spool.descriptor).fill(content.start + offset, buffers)
        finally:
            with content.lock:
                content.users -= 1
                content.left -= nbytes
                if content.left <= 0 and not content.users:
                    self._spool.give_back(content.start, file.size)
                    content.start = -1

    def _begins_stream(self, file: File) -> bool:
        """Return whether to unpack a packed file while it is read. If so, count it among the streams until its last
        byte."""
        with self._table:
            if not self._is_read_once(file) or len(self._streamed) >= _MOST_STREAMED:
                return False
            self._streamed.add(file)
            return True

    def _is_read_once(self, file: File) -> bool:
        """Return whether a packed file is likely to be read once only, and its checksum need not be compared before."""
        assert file.packed is not None
        width = 1
        if file.packed.method in OF_FEATURES:
            width = import_module(OF_FEATURES[file.packed.method]).UNIT
        return file.packed.crc is None and file.size == width * self._readers.expected.get(file, 0)

    def _unpack_anew(self, file: File, content: _Content, to: int) -> None:
        """Unpack a file from its beginning, up to byte `to`, which the spool keeps."""
        assert file.packed is not None
        content.unpacking, content.kept = _Unpacking(file, self._chunks(file, file.packed)), []
        with self._table:
            self.nbytes += file.packed.nbytes
        self._keep(content, to)

    def _chunks(self, file: File, packed: Packed) -> Iterator[bytes]:
        with self._readers.reading(packed.file) as reader:
            yield from UNPACKING[packed.method](file, packed, reader)

    def _keep(self, content: _Content, to: int) -> None:
        """Unpack up to byte `to`, and keep that in the spool."""
        begin = at = content.unpacking.at
        for data in content.unpacking.next(to - at):
            self._spool.write_at(content.start + at, data)
            at += len(data)
        if to > begin:
            content.kept.append((begin, to))

    def close(self) -> None:
        for content in self._contents.values():
            content.unpacking.close()
        self._contents.clear()


class _Content:
    """The content of a packed file: its place in the spool (-1: none), the ranges of it that are `kept` there, the
    number of bytes that are likely to be read yet, and the number of threads that are reading. `unpacking` unpacks the
    rest."""

    __slots__ = ("kept", "left", "lock", "start", "unpacking", "users")

    def __init__(self) -> None:
        self.start = -1
        self.left = self.users = 0
        self.lock = threading.Lock()
        self.kept: list[tuple[int, int]] = []
        self.unpacking = _Unpacking(File("", 0), iter(()))

    def has(self, start: int, stop: int) -> bool:
        """Return whether the spool has bytes `start` to `stop`."""
        return any(first <= start and stop <= last for first, last in self.kept)


class _Unpacking:
    """Unpacks a file once, from beginning to end; `at` bytes came out so far.

    Raises CorruptError if these are not as many as the file has, or have another CRC-32 than is recorded.
    """

    def __init__(self, file: File, chunks: Iterator[bytes]) -> None:
        self._file, self._chunks, self._rest = file, chunks, memoryview(b"")
        self.at = self._crc = 0

    def next(self, count: int) -> Iterator[memoryview]:
        """Yield the next `count` bytes, in pieces. Those after the last must not come."""
        stop, size = self.at + count, self._file.size
        while self.at < stop:
            if not self._rest:
                self._rest = memoryview(self._chunk())
            data, self._rest = self._rest[: stop - self.at], self._rest[stop - self.at :]
            self.at += len(data)
            yield data
        if self.at == size:
            is_longer, self._rest = bool(self._rest), memoryview(b"")  # it holds a chunk, and a chain has thousands
            if is_longer or any(self._chunks):
                raise of_damage(self._file, f"it inflates to more than the {size} bytes recorded for it")
            recorded = self._file.packed and self._file.packed.crc
            if recorded is not None and self._crc != recorded:
                raise of_damage(self._file, f"its checksum is {self._crc:08x}, but {recorded:08x} is recorded")

    def into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes."""
        at = 0
        for data in self.next(len(buffer)):
            buffer[at : at + len(data)] = data
            at += len(data)

    def _chunk(self) -> bytes:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise of_damage(self._file, f"it inflates to {self.at} bytes, but {self._file.size} bytes are recorded")
        if self._file.packed and self._file.packed.crc is not None:
            self._crc = crc32(chunk, self._crc)
        return chunk

    def close(self) -> None:
        """Let go of the reader."""
        if isinstance(self._chunks, Generator):
            self._chunks.close()


class _PackedReader(Reader):
    """Reads a packed file from the spool, after having it unpacked."""

    def __init__(self, file: File, contents: Contents) -> None:
        self.file = file
        self._contents = contents

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._contents.fill(self.file, offset, buffers)


def content_of(data: bytes, method: str, name: str, most: int) -> bytes:
    """Return the content of packed `data`, which messages call `name`. Raise LimitError if it has more than `most`
    bytes."""
    reader = InMemory(data, name)
    packed = Packed(reader.file, 0, len(data), None, method)
    content = bytearray()
    for piece in UNPACKING[method](File(name, 0, packed=packed), packed, reader):
        content += piece
        if len(content) > most:
            raise LimitError(f"{name} unpacks to more than {most} bytes, its largest valid size.")
    return bytes(content)


def _deflated(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Inflate `packed`, and yield its content in chunks."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    total = 0
    for data in chunks_at(reader, packed):
        more = True
        while more:
            try:
                inflated = inflater.decompress(data, CHUNK)
            except zlib.error as error:
                raise of_damage(file, f"it cannot be inflated ({error})") from None
            yield inflated
            total += len(inflated)
            data = inflater.unconsumed_tail
            # After a full chunk there may be more; at the end, zlib keeps the bytes that it did not take.
            more = not inflater.eof and (bool(data) or len(inflated) == CHUNK)
        if inflater.unused_data:
            raise of_damage(file, "data follows its end")
    if not inflater.eof:
        raise of_damage(file, f"its compressed data is cut short, after {total} inflated bytes")


def _zstandard(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    return zstandard_of(file, packed, chunks_at(reader, packed))


def zstandard_of(file: File, packed: Packed, stored: Iterator[bytes]) -> Iterator[bytes]:
    """Unpack the `stored` chunks of `packed` with zstandard, and yield their content in chunks."""
    try:
        import zstandard
    except ImportError:
        raise UnsupportedError(
            f"{packed.file.path} is compressed with zstandard, which requires a package that is not installed.",
            install("zstd"),
        ) from None
    chunks = _Chunks(stored)
    try:
        unpacker = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        with unpacker.stream_reader(chunks, read_size=CHUNK, read_across_frames=True) as stream:
            while inflated := stream.read(CHUNK):
                yield inflated
    except zstandard.ZstdError as error:
        raise of_damage(file, f"it cannot be unpacked ({error})") from None


class _Chunks(io.BytesIO):
    """Chunks as a file, for a reader that reads from beginning to end and never asks for less than a chunk."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks

    def read(self, size: int | None = -1) -> bytes:
        return next(self._chunks, b"")


# Methods of formats. Each module has `unpacked`, which is called as those of `UNPACKING` are, and `UNIT`: the bytes
# that come out for each byte of the tensor.
OF_FEATURES: dict[str, str] = {
    "overwriting": "ckptconv.features.deltas.overwriting",
    **dict.fromkeys(("zstandard frame", "crc32c", "bools"), "ckptconv.features.compressed.packing"),
}


def _of_feature(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    unpacked: Iterator[bytes] = import_module(OF_FEATURES[packed.method]).unpacked(file, packed, reader)
    return unpacked


UNPACKING: dict[str, Callable[[File, Packed, Reader], Iterator[bytes]]] = {
    "deflate": _deflated,
    "zstandard": _zstandard,
    **dict.fromkeys(OF_FEATURES, _of_feature),
}


def chunks_at(reader: Reader, packed: Packed) -> Iterator[bytes]:
    """Yield the bytes of `packed` as they are stored, in chunks."""
    unit = _FAR_CHUNK if is_remote(packed.file.path) else CHUNK
    for at in range(0, packed.nbytes, unit):
        yield reader.read_at(packed.offset + at, min(unit, packed.nbytes - at))


def of_damage(file: File, why: str) -> CorruptError:
    """Return the error for a packed file that is damaged."""
    return CorruptError(f"{file.path} is damaged: {why}.", "Copy or download the archive again.")
