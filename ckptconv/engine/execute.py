"""Carries a plan out: threads, and the order of reads and writes. Knows no format.

Tasks are independent of each other, so threads take them as they come. Where a file is read from far away, or is
written from beginning to end, one thread takes them in order: others fetch what the next ones need, and send what was
made.
"""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from ckptconv.engine.tasks import ALIGNMENT, Needs, Task, tasks
from ckptconv.engine.worker import Seen, Tally, Worker
from ckptconv.plan import Data, FilePlan, Trailer
from ckptconv.storage.files import Readers
from ckptconv.storage.prefetch import REQUESTS, Prefetch, is_read_far
from ckptconv.storage.records import combine
from ckptconv.storage.spool import SpoolingReaders
from ckptconv.storage.writing import Writer
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import BLOCK

Progress: TypeAlias = Callable[[int], None]

# Tensors of less on average, in bytes, are very many.
_SHORT = 16 << 10
# Threads are given small stacks: eight of the usual 8 MiB would count as 64 MiB of memory.
STACK = 512 << 10


def carry_out(
    file: FilePlan,
    writer: Writer,
    readers: Readers,
    *,
    jobs: int | None,
    memory: int,
    progress: Progress | None = None,
    seen: Seen | None = None,
    digests: dict[str, int] | None = None,
    requests: int = REQUESTS,
) -> Tally:
    """Make `file` with `writer`. `memory` (bytes) bounds the buffers of all `jobs` threads together; None are as many
    as serve. From far away, so many `requests` are under way at a time.

    `seen` is told of every piece of data that is read, by any of the threads. The CRC-32 of every tensor that is not
    empty is put into `digests`, by name, if that is given.
    """
    digesting = file.digested or digests is not None
    far = any(map(is_read_far, file.inputs()))
    if far or not writer.positioned:
        worker = _in_order(file, writer, readers, memory, progress, seen, requests if far else 0, digesting)
        if digesting:
            _finish(file, writer, [worker], worker.tally, {} if digests is None else digests)
        return worker.tally
    if file.size <= BLOCK:
        jobs = 1  # there is nothing to share
    jobs = jobs or _threads(file)
    # Four of these is what a worker holds at most.
    unit = max(min(BLOCK, memory // jobs // 4, file.size + ALIGNMENT) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    queue = tasks(file, unit, writer.positioned, max(memory // jobs // 2, unit))
    workers = [Worker(readers, writer, unit, digesting, seen) for _ in range(jobs)]
    if jobs == 1:
        for task in queue:
            size = workers[0].run(task)
            if progress:
                progress(size)
    else:
        _in_threads(queue, workers, progress)
    total = Tally()
    for worker in workers:
        total.add(worker.tally)
    if digesting:
        _finish(file, writer, workers, total, {} if digests is None else digests)
    return total


def _threads(file: FilePlan) -> int:
    """As many as there are processors, up to four; one where there are very many short reads and writes to be made, as
    threads would wait for each other before and after each."""
    if file.size < _SHORT * len(file.parts):
        return 1
    scattered = sum(part.nbytes for part in file.parts if isinstance(part, Data) and part.tensor.scattered)
    return 1 if scattered > file.size // 2 else min(os.cpu_count() or 1, 4)


def _in_order(
    file: FilePlan,
    writer: Writer,
    readers: Readers,
    memory: int,
    progress: Progress | None,
    seen: Seen | None,
    requests: int,
    digesting: bool,
) -> Worker:
    """Make `file` from beginning to end in this thread, while others read what comes next, with `requests` at a
    time, or none if it is all near."""
    unit = max(min(BLOCK, memory // 4, file.size + ALIGNMENT) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    queue = tasks(file, unit, writer.positioned)
    if not requests:
        worker = Worker(readers, writer, unit, digesting, seen)
        _take(queue, worker, progress)
    else:
        assert isinstance(readers, SpoolingReaders)
        needs = Needs(unit)
        with Prefetch(readers, readers.spool, needs, memory=memory, requests=requests) as prefetch:
            worker = Worker(prefetch, writer, unit, digesting, seen)
            _take(prefetch.over(queue), worker, progress)
        worker.tally.bytes_read += prefetch.bytes_fetched
    return worker


def _take(queue: Iterator[Task], worker: Worker, progress: Progress | None) -> None:
    for task in queue:
        size = worker.run(task)
        if progress:
            progress(size)


def _finish(file: FilePlan, writer: Writer, workers: Sequence[Worker], total: Tally, digests: dict[str, int]) -> None:
    """Put the CRC-32 of the tensors into `digests`, and write what is known only now that they are."""
    pieces: dict[str, list[tuple[int, int, int]]] = {}
    for worker in workers:
        for name, made in (worker.digests or {}).items():
            if isinstance(made, int):
                digests[name] = made
            else:
                pieces.setdefault(name, []).extend(made)
        worker.digests = None
    digests.update((name, combine(made)) for name, made in pieces.items())
    for part in file.parts:
        # What was moved as tiles never was in order in memory: it is read again while the system still has it there.
        if isinstance(part, Data) and part.nbytes and part.name not in digests:
            crc = 0
            for at in range(0, part.nbytes, BLOCK):
                crc = zlib.crc32(writer.read_at(part.offset + at, min(BLOCK, part.nbytes - at)), crc)
            digests[part.name] = crc
    for part in file.parts if writer.positioned else ():
        if isinstance(part, Trailer):
            writer.write_at(part.offset, memoryview(part.make(digests)))
            total.bytes_written += part.nbytes


class TensorReader:
    """Reads a tensor's bytes, at most `limit` at a time."""

    def __init__(self, tensor: LazyTensor, readers: Readers, limit: int = BLOCK) -> None:
        self._data = Data(0, tensor, "")
        self._worker = Worker(readers, None, limit)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop`, valid until the next call."""
        return self._worker.bytes_of(self._data, start, stop)

    @property
    def bytes_read(self) -> int:
        """How many bytes were read from files."""
        return self._worker.tally.bytes_read


def same(one: LazyTensor, other: LazyTensor, readers: Readers) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    mine, theirs = TensorReader(one, readers), TensorReader(other, readers)
    return all(
        mine.read(start, stop) == theirs.read(start, stop)
        for start, stop in ((at, min(at + BLOCK, one.nbytes)) for at in range(0, one.nbytes, BLOCK))
    )


def _in_threads(queue: Iterator[Task], workers: list[Worker], progress: Progress | None) -> None:
    taking, stop = threading.Lock(), threading.Event()
    failures: list[BaseException] = []

    def work(worker: Worker) -> None:
        try:
            while not stop.is_set():
                with taking:
                    task = next(queue, None)
                if task is None:
                    return
                size = worker.run(task)
                if progress:
                    progress(size)
        except BaseException as error:
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    try:
        usual = threading.stack_size(STACK)
        # A signal comes before a thread is started or after it, and to none of those that are.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:
            pass
        finally:
            threading.stack_size(usual)
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        if threads[0].ident is None:
            # No room for another: those that run do the work, or else this one.
            work(workers[0])
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    except BaseException:
        # A signal: let every thread finish the piece at hand before the staging area is removed under it.
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if failures:
        raise failures[0]
