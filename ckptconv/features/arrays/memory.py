"""Arrays of lazy tensors: maps of local files where the stored bytes can be used directly, else copies."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, FailedError, LimitError, UsageError
from ckptconv.features.arrays.frameworks import Framework
from ckptconv.formats.source import Source
from ckptconv.plan import MAX_GROWTH, ROOM_TO_GROW, Data, FilePlan
from ckptconv.storage.files import Readers, check_unchanged, is_far, is_held, look
from ckptconv.storage.reading import Options
from ckptconv.storage.writing import Writer
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File
from ckptconv.tensors.slices import as_stored, extent
from ckptconv.text import reason

# Without MAP_NORESERVE, Linux counts a whole private map against the available memory; with it, only written pages.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
# Bytes of buffers in addition to the arrays, for local and for remote files; and of local reads by one thread.
_BUFFERS, _FAR_BUFFERS, _ALONE = 8 << 20, 24 << 20, 2 << 20
# Bytes from which on several threads read.
_SHARED = 32 << 20


class WantedArray(NamedTuple):
    """A tensor for which an array is wanted, with its name for messages.

    `before` and `storage` are the bytes before its first element and of all of the storage that its array shares with
    others; without them it has a storage of its own. `key`, if any, is that of all names that are tied to it.
    """

    name: str
    tensor: LazyTensor
    before: int = 0
    storage: int | None = None
    key: Hashable = None


class Memory:
    """The open files of a checkpoint: readers and maps. For any number of threads.

    It may be used in a process that was forked, which opens the files anew, and can be pickled. `mapped`: use maps.
    """

    def __init__(self, path: str, options: Options, mapped: bool = True, spool_dir: str = "") -> None:
        self._given = (path, options, mapped, spool_dir)
        self._mapped = mapped
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        _, options, _, spool_dir = self._given
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._users = 0
        self._readers = Readers(options, spool_dir)
        self._maps: dict[File, mmap.mmap | None] = {}
        # Arrays of tied tensors that are still in use: the next of the same tensor is the same.
        self._arrays: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self._release = weakref.finalize(self, self._readers.close)

    def __reduce__(self) -> tuple[Callable[..., Memory], tuple[Any, ...]]:
        self.check_open()
        if is_held(self._given[0]):
            raise UsageError(
                f"{self._given[0]} cannot be read in another process: its data exists only in this process."
            )
        return Memory, self._given

    def close(self) -> None:
        """Close the files, once no thread reads them. Arrays stay as they are."""
        with self._lock:
            self._closed = True
            self._maps.clear()
            if not self._users:
                self._release()

    def check_open(self) -> None:
        """Raise UsageError after `close`."""
        if self._closed:
            raise UsageError(f"{self._given[0]} is closed.", "Open it again.")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Readers]:
        if self._process != os.getpid():
            self._begin()  # locks and temporary files are the parent's
        with self._lock:
            self.check_open()
            self._users += 1
        try:
            yield self._readers
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._release()

    def arrays(self, wanted: Sequence[WantedArray], framework: Framework) -> list[Any]:
        """Return an array for each of `wanted`. Tensors that have to be copied are read together.

        Raise CorruptError for a file that has changed since it was opened, FailedError for one that cannot be read, and
        UnsupportedError for a dtype that the framework lacks. Warn of values that a cast made infinite.
        """
        results: list[Any] = []
        known: dict[Hashable, Any] = {}
        used: dict[File, mmap.mmap | None] = {}
        dtypes: set[DType] = set()
        with self._reading() as readers:
            for item in wanted:
                if item.tensor.dtype not in dtypes:
                    framework.check(item.name, item.tensor.dtype)
                    dtypes.add(item.tensor.dtype)
                array = None if item.key is None else self._arrays.get(_key(item, framework))
                if array is not None:
                    check_unchanged({file.stored for file in item.tensor.inputs() if not is_far(file.path)})
                results.append(self._over(item, framework, used) if array is None else array)
            check_unchanged(file for file, memory in used.items() if memory is not None)
            copied = [item for item, array in zip(wanted, results, strict=True) if array is None]
            _check_growth(copied)
            tensors: dict[str, LazyTensor] = {}
            buffers: list[memoryview] = []
            for index, item in enumerate(wanted):
                key = _key(item, framework)
                if results[index] is None:
                    results[index] = known.get(key)
                if results[index] is None:
                    results[index], buffer = _blank(item, framework)
                    tensors[item.name] = item.tensor
                    buffers.append(buffer)
                if key is not None:
                    known.setdefault(key, results[index])
            self._fill(tensors, buffers, readers)
            self._arrays.update(known)
        return results

    def fill(self, tensor: LazyTensor, buffer: memoryview) -> None:
        """Read `tensor` into `buffer`, in C order. Raise and warn as `arrays` does."""
        with self._reading() as readers:
            self._fill({"": tensor}, [buffer], readers)

    def _over(self, wanted: WantedArray, framework: Framework, used: dict[File, mmap.mmap | None]) -> Any:
        """Return an array over a map of the file; None if the stored bytes cannot be used directly. `used` are the maps
        of the files so far."""
        stored = as_stored(wanted.tensor) if self._mapped and wanted.tensor.numel else None
        if stored is None:
            return None
        start = stored.offset - wanted.before
        nbytes = extent(stored) if wanted.storage is None else wanted.storage
        item = stored.dtype.itemsize
        if start % item or stored.offset % item:
            return None
        file = stored.file
        memory = used[file] if file in used else used.setdefault(file, self._map(file))
        if memory is None:
            return None
        try:
            return framework.over(memory, stored, start, nbytes)
        except (RuntimeError, ValueError) as error:
            raise LimitError(
                f"{wanted.name!r} has {stored.nbytes} bytes, more than an array supports: {error}."
            ) from error

    def _map(self, file: File) -> mmap.mmap | None:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = _map(file)
            return self._maps[file]

    def _fill(self, tensors: Mapping[str, LazyTensor], buffers: Sequence[memoryview], readers: Readers) -> None:
        if not tensors:
            return
        # Most programs read maps alone.
        from ckptconv.engine.execute import carry_out

        starts = list(itertools.accumulate((len(buffer) for buffer in buffers), initial=0))
        parts = tuple(Data(start, tensor, name) for start, (name, tensor) in zip(starts, tensors.items(), strict=False))
        plan = FilePlan("", starts[-1], parts)
        files = list(dict.fromkeys(file.stored for file in plan.inputs()))
        far = any(is_far(file.path) for file in files)
        shared = plan.size >= _SHARED
        memory = _FAR_BUFFERS if far else _BUFFERS if shared else _ALONE
        tally = carry_out(plan, _Buffers(buffers, starts), readers, jobs=None if shared else 1, memory=memory)
        # Each request for a remote file asks for the version that was opened.
        check_unchanged(file for file in files if not is_far(file.path))
        for warning in tally.lost("the requested dtype").values():
            warn(warning)


def warn_of(source: Source) -> None:
    """Give the warnings of a conversion of `source`."""
    for warning in source.warnings:
        warn(warning)


def warn(text: str) -> None:
    """Give a warning, with the line that called the library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ("ckptconv", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _key(wanted: WantedArray, framework: Framework) -> Hashable:
    """Return the key of the array that all names tied to a tensor share; None if it has one of its own."""
    return None if wanted.key is None else (id(framework), wanted.key)


def _check_growth(copied: Sequence[WantedArray]) -> None:
    """Raise LimitError if tensors would take memory out of proportion to their files."""
    total = sum(item.tensor.nbytes for item in copied)
    if total <= ROOM_TO_GROW:
        return
    files = dict.fromkeys(itertools.chain.from_iterable(item.tensor.inputs() for item in copied))
    available = sum(file.size for file in files)
    if total > MAX_GROWTH * available + ROOM_TO_GROW:
        largest = max(copied, key=lambda item: item.tensor.nbytes)
        raise LimitError(
            f"Reading would expand {available} bytes of files to {total} bytes of memory: tensors such as "
            f"{largest.name!r} ({largest.tensor.nbytes} bytes) repeat the same elements. Nothing was read.",
            "Read slices of the tensors.",
        )


def _blank(wanted: WantedArray, framework: Framework) -> tuple[Any, memoryview]:
    """Return a new array for a tensor, and its bytes. Raise FailedError if there is not enough memory."""
    try:
        return framework.blank(wanted.tensor)
    except (MemoryError, RuntimeError, ValueError) as error:
        needed = wanted.tensor.nbytes
        raise FailedError(f"There is not enough memory for {wanted.name!r}, which has {needed} bytes.") from error


class _Buffers(Writer):
    """Writes to buffers as if they were one file; the first byte of each is in `starts`."""

    positioned = True

    def __init__(self, buffers: Sequence[memoryview], starts: Sequence[int]) -> None:
        self._buffers, self._starts = buffers, starts

    def write_at(self, offset: int, data: memoryview) -> None:
        index = bisect.bisect_right(self._starts, offset) - 1
        while data:
            buffer, at = self._buffers[index], offset - self._starts[index]
            count = min(len(buffer) - at, len(data))
            buffer[at : at + count] = data[:count]
            data, offset, index = data[count:], offset + count, index + 1


def _map(file: File) -> mmap.mmap | None:
    """Return a private map of a whole file; None if the file is packed, remote, or not a regular file."""
    if file.packed or is_far(file.path) or is_held(file.path) or look(file.path).kind != "file":
        return None
    check_unchanged([file])
    try:
        # Opening a pipe would otherwise wait for a writer.
        with open(file.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            if os.fstat(opened.fileno()).st_size != file.size:
                raise CorruptError(f"{file.path} changed while it was opened.", "Open it again.")
            try:
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                return mmap.mmap(opened.fileno(), file.size, mmap.MAP_PRIVATE | _NO_RESERVE, protection)
            except OSError:
                return mmap.mmap(opened.fileno(), file.size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FailedError(f"{file.path} cannot be mapped: {reason(error)}.") from error


def batches(wanted: Iterable[WantedArray], nbytes: int) -> Iterator[list[WantedArray]]:
    """Yield `wanted` in batches of at most `nbytes` bytes, but at least one tensor."""
    batch: list[WantedArray] = []
    size = 0
    for item in wanted:
        if batch and size + item.tensor.nbytes > nbytes:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.tensor.nbytes
    if batch:
        yield batch
