"""Keep bytes that can be read only once, from beginning to end, where they can be read at any offset.

A compressed record of an archive, and standard input, cannot be read by ranges. Their bytes go in chunks to a private
temporary file without a name, which is gone when this process ends, however it ends. Tensors are then read from there.
A compressed record is unpacked when the first of its bytes is requested, and not at all if none is.
"""

from __future__ import annotations

import bisect
import errno
import io
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from ckptconv.errors import CorruptError, FailedError, LimitError, UnsupportedError, UsageError, damaged
from ckptconv.storage.crc import crc32, crc32c
from ckptconv.storage.files import DescriptorReader, Readers, hold
from ckptconv.storage.handles import Handle, resolved, unnamed
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Options, Reader
from ckptconv.storage.writing import check_space
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import install, reason

# The path that means standard input, and the name that it is read under.
STANDARD_INPUT = "-"
STANDARD_INPUT_NAME = "<stdin>"
# A byte of deflate stands for at most 1,032 bytes: two bits for 258.
MAX_RATIO = 1032
# Bytes of a CRC-32C.
CRC32C_SIZE = 4
# Bytes that are read, and unpacked, at a time; and bytes of a request for a remote file.
CHUNK = 1 << 17
_FAR_CHUNK = 1 << 22
# Bytes of the largest window that a frame of zstandard may ask for: that of levels up to 20.
_MOST_WINDOW = 1 << 25
# Ranges of a packed file, passed over when it was unpacked, that are kept one by one.
MOST_KEPT = 64
ELSEWHERE = "Give a directory with more space: --spool-dir."
# Paths of descriptors that were open before: a shell puts one in the place of <(...).
_DESCRIPTOR = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/\d{1,9}")


def default_directory() -> str:
    """Return the directory to spool to by default: TMPDIR, else /var/tmp, which unlike /tmp is on a disk everywhere."""
    for directory in (os.environ.get("TMPDIR"), "/var/tmp"):
        if directory and os.path.isdir(directory):
            return directory
    return "/tmp"


class Spool:
    """A temporary file without a name in `directory`, for several threads. It grows, and reuses released room."""

    def __init__(self, directory: str = "") -> None:
        self.directory = directory or default_directory()
        self._end = 0
        # Released room: offset and size in bytes, in order and never adjacent.
        self._free: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._fd = -1

    @property
    def descriptor(self) -> int:
        """The descriptor of the file, which is made at first use."""
        with self._lock:
            if self._fd < 0:
                self._fd = _unnamed(self.directory)
            return self._fd

    def room(self, size: int) -> int:
        """Reserve `size` bytes and return their offset."""
        with self._lock:
            for index, (start, length) in enumerate(self._free):
                if length >= size:
                    self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                    return start
            start = self._end
            self._end += size
            return start

    def give_back(self, start: int, size: int) -> None:
        """Release the `size` bytes at `start`, which `room` reserved."""
        if not size:
            return
        with self._lock:
            at = bisect.bisect(self._free, (start, size))
            stop = start + size
            if at < len(self._free) and self._free[at][0] == stop:
                stop += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == start:
                at -= 1
                start = self._free.pop(at)[0]
            self._free.insert(at, (start, stop - start))

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write `data` at `offset`. Raises FailedError if that fails, as on a full disk."""
        remaining = memoryview(data)
        try:
            while remaining:
                count = os.pwrite(self.descriptor, remaining, offset)
                remaining, offset = remaining[count:], offset + count
        except OSError as error:
            raise _cannot_write(self.directory, error) from error

    def check_space(self, size: int) -> None:
        """Raise FailedError if `size` more bytes do not fit on the disk."""
        check_space(self.directory, size, "Unpacking the compressed tensors", ELSEWHERE)

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes more fit."""
        try:
            self.check_space(size)
        except FailedError:
            return False
        return True

    def close(self) -> None:
        """Close the file, which deletes it."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _unnamed(directory: str) -> int:
    try:
        with Handle.open(resolved(directory)) as handle:
            return unnamed(handle)
    except OSError as error:
        raise _cannot_write(directory, error) from error


def _cannot_write(directory: str, error: OSError) -> FailedError:
    return FailedError(
        f"A temporary file in {directory} cannot be written: {reason(error)}.",
        ELSEWHERE if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Give another directory: --spool-dir.",
    )


# --------------------------------------------------------------------------------------------------- standard input


def is_pipe(path: str) -> bool:
    """Whether `path` means standard input, or is the name of a pipe that this process was started with."""
    if path == STANDARD_INPUT:
        return True
    if not _DESCRIPTOR.fullmatch(path):
        return False
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def take_pipe(path: str, directory: str = "") -> str:
    """Read a pipe to its end, into a temporary file. Return the name that it can be read under.

    Standard input that is a file is read in place. Raises UsageError for a terminal, and CorruptError if nothing comes.
    """
    name = STANDARD_INPUT_NAME if path == STANDARD_INPUT else path
    try:
        source = os.dup(0) if path == STANDARD_INPUT else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FailedError(f"{name} cannot be read: {reason(error)}.") from error
    if _is_at_start_of_file(source):
        hold(name, source)
        return name
    try:
        if os.isatty(source):
            raise UsageError(
                "Standard input is a terminal, but a checkpoint was expected.", "Pipe one in: cat x.pt | ckptconv …"
            )
        spool = Spool(directory)
        chunk = None
        for chunk in _chunks_of(source, name):
            spool.write_at(spool.room(len(chunk)), chunk)
        if chunk is None:
            mode = os.fstat(source).st_mode
            subject = f"the pipe {name}" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else name
            raise CorruptError(
                f"{subject} is empty.",
                "Check the output of the command before the pipe; with `set -o pipefail` the shell reports its "
                "failure.",
            )
        hold(name, spool.descriptor)
    finally:
        os.close(source)
    return name


def _is_at_start_of_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode) and os.lseek(fd, 0, os.SEEK_CUR) == 0


def _chunks_of(fd: int, name: str) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(CHUNK))
    try:
        while count := os.readv(fd, [buffer]):
            yield buffer[:count]
    except OSError as error:
        raise FailedError(f"{name} cannot be read: {reason(error)}.") from error


# ------------------------------------------------------------------------------------------------ compressed records


def check_ratio(name: str, packed: int, size: int) -> None:
    """Raise LimitError if `packed` bytes of deflate cannot inflate to `size` bytes."""
    if size > MAX_RATIO * packed:
        raise LimitError(
            f"{name} should inflate from {packed} to {size} bytes, but deflate cannot produce more than "
            f"{MAX_RATIO * packed}."
        )


class SpoolingReaders(Readers):
    """Readers of files and of packed files, which are unpacked into a temporary file in `directory`.

    The room of an unpacked file is given back once as many bytes were read as `expect` said, or as the file has if that
    is more. If more are read, it is unpacked again, which costs no more than the reads did. `bytes_unpacked` counts the
    packed bytes that were read. A file that is read once, in order, and has no checksum to be compared before, is
    unpacked as it is read; only ranges that are passed over are kept in the temporary file. A copy of this process has
    a temporary file of its own.
    """

    def __init__(self, options: Options | None = None, directory: str = "") -> None:
        super().__init__(options)
        self.bytes_unpacked = 0
        self.spool = Spool(directory)
        self._contents: dict[File, _Content] = {}
        self._expected: Mapping[File, int] = {}
        self._table = threading.Lock()
        self._process = os.getpid()

    def expect(self, reading: Mapping[File, int]) -> None:
        """Announce how many bytes of each packed file will be read. Raises FailedError if the largest has no room."""
        self._expected = reading
        size = max((file.size for file in reading), default=0)
        if size:
            self.spool.check_space(size)

    def open(self, file: File) -> Reader:
        return super().open(file) if file.packed is None else _PackedReader(file, self)

    def unpacked(self) -> int:
        found, self.bytes_unpacked = self.bytes_unpacked, 0
        return found

    def fill_unpacked(self, file: File, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from `offset` of a packed file's content, which is unpacked first if the spool lacks it."""
        assert file.packed is not None
        with self._table:
            if self._process != os.getpid():
                self.spool, self._contents = Spool(self.spool.directory), {}
                self._process, self.bytes_unpacked = os.getpid(), 0
            content = self._contents.setdefault(file, _Content())
        nbytes = sum(map(len, buffers))
        with content.lock:
            if content.start < 0:
                content.left = max(file.size, self._expected.get(file, 0))
                content.start = self.spool.room(file.size)
                self._unpack_anew(file, content, to=0 if self._is_read_once(file) else file.size)
            is_next = offset >= content.unpacking.at and len(content.kept) < MOST_KEPT
            if is_next:
                self._keep(content, offset)
                for buffer in buffers:
                    content.unpacking.into(buffer)
            elif not content.has(offset, offset + nbytes):
                self._unpack_anew(file, content, to=file.size)
            content.users += 1
        try:
            if not is_next:
                DescriptorReader(file, self.spool.descriptor).fill(content.start + offset, buffers)
        finally:
            with content.lock:
                content.users -= 1
                content.left -= nbytes
                if content.left <= 0 and not content.users:
                    self.spool.give_back(content.start, file.size)
                    content.start = -1

    def _is_read_once(self, file: File) -> bool:
        """Whether a packed file is likely to be read once, and its checksum need not be compared first."""
        assert file.packed is not None
        width = 1
        if file.packed.method in LAYING_OUT:
            width = import_module(LAYING_OUT[file.packed.method]).UNIT
        return file.packed.crc is None and file.size == width * self._expected.get(file, 0)

    def _unpack_anew(self, file: File, content: _Content, to: int) -> None:
        """Unpack a file from its beginning, up to byte `to`, which the spool keeps."""
        assert file.packed is not None
        content.unpacking, content.kept = _Unpacking(file, self._chunks(file, file.packed)), []
        with self._table:
            self.bytes_unpacked += file.packed.nbytes
        self._keep(content, to)

    def _chunks(self, file: File, packed: Packed) -> Iterator[bytes]:
        with self.reading(packed.file) as reader:
            yield from UNPACKING[packed.method](file, packed, reader)

    def _keep(self, content: _Content, to: int) -> None:
        """Unpack up to byte `to`, and keep that in the spool."""
        begin = at = content.unpacking.at
        for data in content.unpacking.next(to - at):
            self.spool.write_at(content.start + at, data)
            at += len(data)
        if to > begin:
            content.kept.append((begin, to))

    def __enter__(self) -> SpoolingReaders:
        return self

    def close(self) -> None:
        for content in self._contents.values():
            content.unpacking.close()
        super().close()
        self._contents.clear()
        self.spool.close()


class _Content:
    """The content of a packed file: where it is in the spool (-1: not there), which ranges of it are `kept` there, how
    many more bytes are likely to be read from it, and how many threads are reading. `unpacking` makes the rest."""

    __slots__ = ("kept", "left", "lock", "start", "unpacking", "users")

    def __init__(self) -> None:
        self.start = -1
        self.left = self.users = 0
        self.lock = threading.Lock()
        self.kept: list[tuple[int, int]] = []
        self.unpacking = _Unpacking(File("", 0), iter(()))

    def has(self, start: int, stop: int) -> bool:
        """Whether the spool has bytes `start` to `stop`."""
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
            if self._rest or any(self._chunks):
                raise _damaged(self._file, f"it inflates to more than the {size} bytes of its description")
            recorded = self._file.packed and self._file.packed.crc
            if recorded is not None and self._crc != recorded:
                raise _damaged(self._file, f"its checksum is {self._crc:08x}, and {recorded:08x} is recorded")

    def into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes."""
        at = 0
        for data in self.next(len(buffer)):
            buffer[at : at + len(data)] = data
            at += len(data)

    def _chunk(self) -> bytes:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise _damaged(self._file, f"it inflates to {self.at} bytes, and it is said to have {self._file.size}")
        if self._file.packed and self._file.packed.crc is not None:
            self._crc = crc32(chunk, self._crc)
        return chunk

    def close(self) -> None:
        """Let go of the reader."""
        if isinstance(self._chunks, Generator):
            self._chunks.close()


class _PackedReader(Reader):
    """Reads a packed file from the spool, after having it unpacked."""

    def __init__(self, file: File, readers: SpoolingReaders) -> None:
        self.file = file
        self._readers = readers

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._readers.fill_unpacked(self.file, offset, buffers)


class Ends(NamedTuple):
    """Facts of an unpacked file: its size, its CRC-32, and its first and last bytes."""

    size: int
    crc: int
    head: bytes
    tail: bytes


def ends_of(file: File, reader: Reader, keep: int, most: int) -> Ends:
    """Unpack a packed file of unknown size, and keep `keep` bytes of either end (a little more of the tail).

    Raises LimitError if it has more than `most` bytes, CorruptError if it cannot be unpacked.
    """
    assert file.packed is not None
    head, tail = bytearray(), b""
    size = crc = 0
    for data in UNPACKING[file.packed.method](file, file.packed, reader):
        size += len(data)
        if size > most:
            raise LimitError(f"{file.path} is damaged: it unpacks to more than {most} bytes, the limit.")
        crc = crc32(data, crc)
        head += data[: max(keep - len(head), 0)]
        tail = (tail + data)[-max(keep, len(data)) :]
    return Ends(size, crc, bytes(head), tail)


def content_of(file: File, reader: Reader, most: int) -> bytes:
    """Return the content of a packed file. Raise LimitError if it has more than `most` bytes."""
    assert file.packed is not None
    content = bytearray()
    for piece in UNPACKING[file.packed.method](file, file.packed, reader):
        content += piece
        if len(content) > most:
            raise LimitError(f"{file.path} unpacks to more than the {most} bytes that it can have.")
    return bytes(content)


def _deflated(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Inflate `packed`, and yield its content in chunks."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    total = 0
    for data in _chunks_at(reader, packed):
        more = True
        while more:
            try:
                inflated = inflater.decompress(data, CHUNK)
            except zlib.error as error:
                raise _damaged(file, f"it cannot be inflated ({error})") from None
            yield inflated
            total += len(inflated)
            data = inflater.unconsumed_tail
            # After a full chunk there may be more; at the end, zlib keeps the bytes that it did not take.
            more = not inflater.eof and (bool(data) or len(inflated) == CHUNK)
        if inflater.unused_data:
            raise _damaged(file, "data follows its end")
    if not inflater.eof:
        raise _damaged(file, f"it inflates to {total} bytes, and does not end there")


def _zstandard(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Unpack `packed` with zstandard, and yield its content in chunks."""
    try:
        import zstandard
    except ImportError:
        raise UnsupportedError(
            f"{packed.file.path} is compressed with zstandard, for which a package is not installed.",
            install("zstd"),
        ) from None
    chunks = _Chunks(_chunks_at(reader, packed))
    try:
        unpacker = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        with unpacker.stream_reader(chunks, read_size=CHUNK, read_across_frames=True) as stream:
            while inflated := stream.read(CHUNK):
                yield inflated
    except zstandard.ZstdError as error:
        raise _damaged(file, f"it cannot be unpacked ({error})") from None


class _Chunks(io.BytesIO):
    """Chunks as a file, for a reader that reads from beginning to end and never asks for less than a chunk."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks

    def read(self, size: int | None = -1) -> bytes:
        return next(self._chunks, b"")


# Methods of features, which lay out the bytes that zstandard unpacks. Each module has `laid_out`, and `UNIT`: the bytes
# of the layout for each byte of the tensor.
LAYING_OUT: dict[str, str] = {
    "overwriting": "ckptconv.features.deltas.overwriting",
}


def _laid_out(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    module = import_module(LAYING_OUT[packed.method])
    laid: Iterator[bytes] = module.laid_out(
        lambda: _zstandard(file, packed, reader), file.size // module.UNIT, lambda why: _damaged(file, why)
    )
    return laid


def _summed(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Yield data that is followed by its own CRC-32C, and compare the checksums at the end."""
    size, crc = packed.nbytes - CRC32C_SIZE, 0
    for chunk in _chunks_at(reader, packed._replace(nbytes=size)):
        crc = crc32c(chunk, crc)
        yield chunk
    check_crc32c(file.path, crc, reader.read_at(packed.offset + size, CRC32C_SIZE))


def check_crc32c(name: str, crc: int, recorded: bytes) -> None:
    """Raise CorruptError if `recorded` is not the CRC-32C that was computed."""
    if crc != int.from_bytes(recorded, "little"):
        raise damaged(f"{name} has changed: its CRC-32C is not the one that is recorded.")


UNPACKING: dict[str, Callable[[File, Packed, Reader], Iterator[bytes]]] = {
    "deflate": _deflated,
    "zstandard": _zstandard,
    **dict.fromkeys(LAYING_OUT, _laid_out),
    "crc32c": _summed,
}


def _chunks_at(reader: Reader, packed: Packed) -> Iterator[bytes]:
    unit = _FAR_CHUNK if is_remote(packed.file.path) else CHUNK
    for at in range(0, packed.nbytes, unit):
        yield reader.read_at(packed.offset + at, min(unit, packed.nbytes - at))


def _damaged(file: File, why: str) -> CorruptError:
    return CorruptError(f"{file.path} is damaged: {why}.", "Copy or download the archive again.")
