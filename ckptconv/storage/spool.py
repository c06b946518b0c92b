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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, FailedError, LimitError, UnsupportedError, UsageError
from ckptconv.storage import remote
from ckptconv.storage.crc import crc32
from ckptconv.storage.files import DescriptorReader, Options, Reader, Readers, hold
from ckptconv.storage.handles import Handle, resolved, unnamed
from ckptconv.storage.overwriting import laid_out
from ckptconv.storage.paths import is_remote
from ckptconv.storage.writing import check_space, reason
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import install

# The path that means standard input, and the name that it is read under.
STANDARD_INPUT = "-"
STANDARD_INPUT_NAME = "<stdin>"
# A byte of deflate stands for at most 1,032 bytes: two bits for 258.
MAX_RATIO = 1032
# Bytes that are read, and unpacked, at a time; and bytes of a request for a remote file.
CHUNK = 1 << 17
_FAR_CHUNK = 1 << 22
# Bytes that a frame of zstandard may ask to be kept: what levels up to 20 ask for.
_MOST_WINDOW = 1 << 25
_ELSEWHERE = "Name a directory with more room: --spool-dir."
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
        rest = memoryview(data)
        try:
            while rest:
                count = os.pwrite(self.descriptor, rest, offset)
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise _cannot_write(self.directory, error) from error

    def check_space(self, size: int) -> None:
        """Raise FailedError if `size` more bytes do not fit on the disk."""
        check_space(self.directory, size, "Unpacking the compressed tensors", _ELSEWHERE)

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
        _ELSEWHERE if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Name another directory: --spool-dir.",
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
                "Standard input is a terminal, where a checkpoint was expected.", "Pipe one in: cat x.pt | ckptconv …"
            )
        spool = Spool(directory)
        chunk = None
        for chunk in _chunks_of(source, name):
            spool.write_at(spool.room(len(chunk)), chunk)
        if chunk is None:
            mode = os.fstat(source).st_mode
            what = f"the pipe {name}" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else name
            raise CorruptError(
                f"Nothing came out of {what}: it is empty.",
                "Look at what the command before it says; with `set -o pipefail` the shell reports that it failed.",
            )
        hold(name, spool.descriptor)
    finally:
        os.close(source)
    return name


def take_url(url: str, options: Options, directory: str = "") -> bool:
    """If the server of `url` gives whole files only, download the file to a temporary file that `url` then refers to.

    Returns whether it was downloaded. Raises FailedError if the download fails or has no room.
    """
    fs, inner = remote.filesystem(url, options)
    try:
        row = remote.info(fs, inner)
        if row is None or row["type"] == "directory" or remote.gives_ranges(fs, inner, row):
            return False
        spool = Spool(directory)
        check_space(spool.directory, row.get("size") or 0, f"What {url} names", _ELSEWHERE)
        remote.whole(fs, inner, spool.write_at)
    except CkptconvError:
        raise
    except Exception as error:
        raise FailedError(f"{url} cannot be read: {remote.why(error)}.", remote.hint(error)) from error
    hold(url, spool.descriptor)
    return True


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
            f"{name} is said to be {size} bytes, deflated to {packed}: deflate makes no more than "
            f"{MAX_RATIO * packed} of these."
        )


class SpoolingReaders(Readers):
    """Readers of files and of packed files, which are unpacked into a temporary file in `directory`.

    The room of an unpacked file is given back once as many bytes were read as `expect` said, or as the file has if that
    is more. If more are read, it is unpacked again, which costs no more than the reads did. `bytes_unpacked` counts the
    packed bytes that were read.
    """

    def __init__(self, options: Options | None = None, directory: str = "") -> None:
        super().__init__(options)
        self.bytes_unpacked = 0
        self.spool = Spool(directory)
        self._contents: dict[File, _Content] = {}
        self._expected: Mapping[File, int] = {}
        self._table = threading.Lock()

    def expect(self, reading: Mapping[File, int]) -> None:
        """Announce how many bytes of each packed file will be read. Raises FailedError if the largest has no room."""
        self._expected = reading
        size = max((file.size for file in reading), default=0)
        if size:
            self.spool.check_space(size)

    def open(self, file: File) -> Reader:
        return super().open(file) if file.packed is None else _PackedReader(file, self)

    def fill_unpacked(self, file: File, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from `offset` of a packed file's content, which is unpacked first if the spool lacks it."""
        assert file.packed is not None
        with self._table:
            content = self._contents.setdefault(file, _Content())
        with content.lock:
            if content.start < 0:
                start = self.spool.room(file.size)
                with self.reading(file.packed.file) as reader:
                    _unpack(file, file.packed, reader, start, self.spool)
                content.start, content.left = start, max(file.size, self._expected.get(file, 0))
                with self._table:
                    self.bytes_unpacked += file.packed.nbytes
            content.users += 1
        try:
            DescriptorReader(file, self.spool.descriptor).fill(content.start + offset, buffers)
        finally:
            with content.lock:
                content.users -= 1
                content.left -= sum(map(len, buffers))
                if content.left <= 0 and not content.users:
                    self.spool.give_back(content.start, file.size)
                    content.start = -1

    def __enter__(self) -> SpoolingReaders:
        return self

    def close(self) -> None:
        super().close()
        self._contents.clear()
        self.spool.close()


class _Content:
    """Where the content of a packed file is in the spool (-1: not there), how many more bytes are likely to be read
    from it, and how many threads are reading."""

    __slots__ = ("left", "lock", "start", "users")

    def __init__(self) -> None:
        self.start = -1
        self.left = self.users = 0
        self.lock = threading.Lock()


class _PackedReader(Reader):
    """Reads a packed file from the spool, after having it unpacked."""

    def __init__(self, file: File, readers: SpoolingReaders) -> None:
        self.file = file
        self._readers = readers

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._readers.fill_unpacked(self.file, offset, buffers)


def _unpack(file: File, packed: Packed, reader: Reader, start: int, spool: Spool) -> None:
    """Unpack `packed` to `start` of the spool. Raises CorruptError if its size or CRC-32 is not as recorded."""
    done = crc = 0
    for made in UNPACKING[packed.method](file, packed, reader):
        if done + len(made) > file.size:
            raise _damaged(file, f"it inflates to more than the {file.size} bytes it is said to have")
        spool.write_at(start + done, made)
        if packed.crc is not None:
            crc = crc32(made, crc)
        done += len(made)
    if done != file.size:
        raise _damaged(file, f"it inflates to {done} bytes, and it is said to have {file.size}")
    if packed.crc is not None and crc != packed.crc:
        raise _damaged(file, f"its checksum is {crc:08x}, and {packed.crc:08x} is recorded")


class Ends(NamedTuple):
    """What a packed file unpacks to: its size, its CRC-32, and its first and last bytes."""

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
    for made in UNPACKING[file.packed.method](file, file.packed, reader):
        size += len(made)
        if size > most:
            raise LimitError(f"{file.path} is damaged: it unpacks to more than the {most} bytes that it can have.")
        crc = crc32(made, crc)
        head += made[: max(keep - len(head), 0)]
        tail = (tail + made)[-max(keep, len(made)) :]
    return Ends(size, crc, bytes(head), tail)


def _deflated(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Inflate `packed`, and yield its content in chunks."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    total = 0
    for data in _chunks_at(reader, packed):
        more = True
        while more:
            try:
                made = inflater.decompress(data, CHUNK)
            except zlib.error as error:
                raise _damaged(file, f"it cannot be inflated ({error})") from None
            yield made
            total += len(made)
            data = inflater.unconsumed_tail
            # After a full chunk there may be more.
            more = bool(data) or len(made) == CHUNK
        if inflater.unused_data:
            raise _damaged(file, "something follows the end of it")
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
            while made := stream.read(CHUNK):
                yield made
    except zstandard.ZstdError as error:
        raise _damaged(file, f"it cannot be unpacked ({error})") from None


class _Chunks(io.BytesIO):
    """Chunks as a file, for a reader that reads from beginning to end and never asks for less than a chunk."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks

    def read(self, size: int | None = -1) -> bytes:
        return next(self._chunks, b"")


def _overwriting(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Unpack what overwrites a tensor of half as many bytes as `file` has."""

    def unpacked() -> Iterator[bytes]:
        return _zstandard(file, packed, reader)

    return laid_out(unpacked, file.size // 2, lambda why: _damaged(file, why))


UNPACKING: dict[str, Callable[[File, Packed, Reader], Iterator[bytes]]] = {
    "deflate": _deflated,
    "zstandard": _zstandard,
    "overwriting": _overwriting,
}


def _chunks_at(reader: Reader, packed: Packed) -> Iterator[bytes]:
    unit = _FAR_CHUNK if is_remote(packed.file.path) else CHUNK
    for at in range(0, packed.nbytes, unit):
        yield reader.read_at(packed.offset + at, min(unit, packed.nbytes - at))


def _damaged(file: File, why: str) -> CorruptError:
    return CorruptError(f"{file.path} is damaged: {why}.", "Copy or download the archive again.")
