"""Files, local or remote: entries, listings, ranged reads.

Local paths go straight to the operating system. Anything with a URL scheme goes through fsspec, imported only then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from ckptconv.errors import CorruptError, FailedError, MissingError, UsageError
from ckptconv.process import needed
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry, Options, Reader, changed, ends_early
from ckptconv.storage.stores import reached
from ckptconv.tensors.moves import File
from ckptconv.text import reason

if TYPE_CHECKING:
    from ckptconv.storage.buffered import BufferedReader

# The feature that keeps data in a temporary file: `spool` in its folder has `Spool`.
SPOOL = "spool"
# Number of files to keep open for the next read; within a common limit on descriptors (1,024).
OPEN_FILES = 256
# readv takes at most this many buffers in one call (IOV_MAX on every system we know).
MAX_BUFFERS = 1024


# --------------------------------------------------------------------------------------------------------- places


# Open descriptors, and readers of bytes in memory, by the name under which they are read in place of a path.
_held: dict[str, int] = {}
_in_memory: dict[str, Reader] = {}


def hold(name: str, fd: int) -> None:
    """Make the open file `fd` readable under `name`, as if that were its path, for the lifetime of this process."""
    _held[name] = fd


@contextlib.contextmanager
def held(name: str, fd: int) -> Iterator[None]:
    """Make the open file `fd` readable under `name` while the block runs."""
    hold(name, fd)
    try:
        yield
    finally:
        del _held[name]


@contextlib.contextmanager
def holding(files: Mapping[str, Reader]) -> Iterator[None]:
    """Make bytes in memory readable under their names, as if these were paths, while the block runs."""
    _in_memory.update(files)
    try:
        yield
    finally:
        for name in files:
            del _in_memory[name]


def is_held(path: str) -> bool:
    """Return whether `path` is not a path, but the name of something that this process holds."""
    return path in _held or path in _in_memory


def is_far(path: str) -> bool:
    """Return whether `path` is read through fsspec: it is remote, and was not already read and held here."""
    return is_remote(path) and path not in _held


def is_read_far(file: File) -> bool:
    """Return whether a file is remote, and not compressed inside another."""
    return file.packed is None and is_far(file.path)


def look(path: str, options: Options | None = None) -> Entry:
    """Return the entry at `path`, following symbolic links. Raises FailedError if it cannot be determined."""
    if is_far(path):
        entry: Entry = reached(path).look(path, options)
        return entry
    if path in _in_memory:
        return Entry("file", _in_memory[path].file)
    try:
        status = os.stat(_held.get(path, path))
    except (FileNotFoundError, NotADirectoryError):
        return Entry("missing", File(path, 0))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return Entry("missing", File(path, 0))  # no file has such a name
        raise FailedError(f"{path!r} cannot be accessed: {_why(error)}.") from error
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    return Entry(kind, File(path, status.st_size, _stamp(status)), status.st_mtime)


def _why(error: Exception) -> str:
    return reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}"


def listing(directory: str, options: Options | None = None) -> dict[str, Entry]:
    """Return the entries of a directory by name, sorted."""
    if is_remote(directory):
        entries: dict[str, Entry] = reached(directory).listing(directory, options)
        return entries
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise FailedError(f"{directory} cannot be listed: {reason(error)}.") from error
    return {name: _look_inside(os.path.join(directory, name)) for name in names}


def _look_inside(path: str) -> Entry:
    """Return the entry at a path of a listing. A circular link, or one to another user's private file, is an error only
    if it is named."""
    try:
        return look(path)
    except FailedError as error:
        number = error.__cause__.errno if isinstance(error.__cause__, OSError) else 0
        if number == errno.ELOOP or (number == errno.EACCES and os.path.islink(path)):
            return Entry("missing", File(path, 0))
        raise


# -------------------------------------------------------------------------------------------------------- reading


class DescriptorReader(Reader):
    """Reads from an open descriptor, and does not close it."""

    def __init__(self, file: File, fd: int) -> None:
        self.file = file
        self._fd = fd

    def read_at(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            raise FailedError(f"{self.file.path} cannot be read: {reason(error)}.") from error
        return data if len(data) == length else super().read_at(offset, length)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        pending = list(buffers)
        while pending:
            batch = pending[:MAX_BUFFERS]
            wanted = sum(map(len, batch))
            try:
                count = os.preadv(self._fd, batch, offset)
            except OSError as error:
                raise FailedError(f"{self.file.path} cannot be read: {reason(error)}.") from error
            offset += count
            if count == wanted:
                del pending[: len(batch)]
                continue
            if not count:
                raise ends_early(self.file.path, offset, wanted)
            while count >= len(pending[0]):
                count -= len(pending.pop(0))
            pending[0] = pending[0][count:]

    def fill_runs(self, offsets: Iterable[int], length: int, out: memoryview) -> None:
        fd, at = self._fd, 0
        for offset in offsets:
            run = out[at : at + length]
            at += length
            try:
                count = os.preadv(fd, (run,), offset)
            except OSError as error:
                raise FailedError(f"{self.file.path} cannot be read: {reason(error)}.") from error
            if count != length:
                self.fill(offset, [run])


class LocalReader(DescriptorReader):
    def __init__(self, file: File) -> None:
        held_fd = _held.get(file.path)
        try:
            # Opening a pipe would otherwise wait for a writer.
            fd = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if held_fd is None else os.dup(held_fd)
        except OSError as error:
            raise FailedError(f"{file.path} cannot be read: {reason(error)}.") from error
        if held_fd is None and not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CorruptError(f"{file.path} is no longer the file that was opened.")
        super().__init__(file, fd)

    def close(self) -> None:
        os.close(self._fd)


class Readers:
    """Readers by file, opened at first use; beyond a limit, the least recently used one is closed. Packed files are
    unpacked into a temporary file in `directory`."""

    def __init__(self, options: Options | None = None, directory: str = "", *, limit: int = OPEN_FILES) -> None:
        self._options = options
        self._limit = limit
        self._directory, self._process = directory, os.getpid()
        self._spool: Any = None
        self._contents: Any = None
        # Bytes that will be read of each packed file.
        self.expected: Mapping[File, int] = {}
        # Readers by path; those of packed files, which have no path, by file.
        self._open: OrderedDict[str | File, Reader] = OrderedDict()
        self._busy: dict[str | File, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, file: File) -> Iterator[Reader]:
        """Yield the reader of `file`, which stays open at least until the block ends."""
        key = file if file.packed else file.path
        with self._lock:
            reader = self._open.get(key)
            if reader is None:
                reader = self._open[key] = self.open(file)
                self._shrink(keep=key)
            self._open.move_to_end(key)
            self._busy[key] = self._busy.get(key, 0) + 1
        try:
            yield reader
        finally:
            with self._lock:
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]

    def open(self, file: File) -> Reader:
        """Return a new reader of `file`."""
        if file.packed is None:
            return _in_memory.get(file.path) or _opened(file, self._options)
        # `reading`, which opens files, does so in one thread at a time.
        if self._contents is None:
            from ckptconv.storage.packed import unpacking

            self._contents = unpacking(file.path).Contents(self)
        reader: Reader = self._contents.reader_of(file)
        return reader

    @property
    def spool(self) -> Any:
        """The temporary file of this process: a `Spool` of the feature that has them."""
        if self._spool is None or self._process != os.getpid():
            kept = needed(SPOOL, "spool", "A temporary file")
            self._spool, self._process = kept.Spool(self._directory), os.getpid()
        return self._spool

    def expect(self, reading: Mapping[File, int]) -> None:
        """Announce how many bytes of each packed file will be read. Raises UnsupportedError if nothing unpacks them,
        FailedError if the largest has no room."""
        if reading:
            from ckptconv.storage.packed import unpacking

            unpacking(next(iter(reading)).path)
        self.expected = reading
        size = max((file.size for file in reading), default=0)
        if size:
            self.spool.check_space(size)

    @property
    def bytes_unpacked(self) -> int:
        """Number of packed bytes read since the last call of `unpacked`."""
        nbytes: int = self._contents.nbytes if self._contents else 0
        return nbytes

    def unpacked(self) -> int:
        """Return the number of packed bytes read since the last call."""
        nbytes = self.bytes_unpacked
        if nbytes:
            self._contents.nbytes = 0
        return nbytes

    def _shrink(self, keep: str | File) -> None:
        for key in list(self._open):
            if len(self._open) <= self._limit:
                return
            if key != keep and key not in self._busy:
                self._open.pop(key).close()

    def close(self) -> None:
        if self._contents:
            self._contents.close()
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
        if self._spool:
            self.spool.close()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@overload
def open_reader(file: File | str, options: Options | None = None) -> Reader: ...
@overload
def open_reader(file: File | str, options: Options | None = None, *, around: Literal[True]) -> BufferedReader: ...
def open_reader(file: File | str, options: Options | None = None, *, around: bool = False) -> Reader:
    """Return a reader of the descriptions in `file`, a path or the `File` that `look` found.

    It is buffered if the file is remote, or with `around`, which also fetches both sides of a request. Raises
    UsageError if the path is not a file.
    """
    if isinstance(file, str):
        entry = look(file, options)
        if entry.kind == "missing":
            raise MissingError(f"{file} does not exist.")
        if entry.kind != "file":
            raise UsageError(f"{file} is {entry.described}, but a file was expected.")
        file = entry.file
    reader = _opened(file, options)
    if not around and not is_far(file.path):
        return reader
    from ckptconv.storage.buffered import BufferedReader

    return BufferedReader(reader, around, far=is_far(file.path))


def _opened(file: File, options: Options | None) -> Reader:
    """Return a reader of `file`, which no other keeps open."""
    if not is_far(file.path):
        return LocalReader(file)
    reader: Reader = reached(file.path).RemoteReader(file, options)
    return reader


def read_text(path: str, limit: int, options: Options | None = None) -> str:
    """Return the text of a small file, at most `limit` bytes. Raises CorruptError if it is larger or not UTF-8."""
    with open_reader(path, options) as reader:
        if reader.file.size > limit:
            raise CorruptError(f"{path} has {reader.file.size} bytes, but at most {limit} were expected.")
        data = reader.read_at(0, reader.file.size)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def check_unchanged(files: Iterable[File], options: Options | None = None) -> None:
    """Raise CorruptError if one of `files` has changed since it was opened."""
    for file in files:
        now = look(file.path, options)
        if (now.file.size, now.file.stamp) != (file.size, file.stamp):
            raise changed(file, now)
