"""Carries out a plan: threads, and the order of reads and writes. Knows no format.

Tasks are independent, so threads take them in any order. If an input is remote, or the output has to be written from
beginning to end, one thread takes the tasks in order while others prefetch for the next ones and upload.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from ckptconv.engine.buffers import Seen, Tally
from ckptconv.engine.tasks import ALIGNMENT, Task, tasks
from ckptconv.engine.worker import Done, Worker
from ckptconv.plan import Data, FilePlan, Literal, Trailer
from ckptconv.process import is_forkable
from ckptconv.storage.files import Readers, is_read_far
from ckptconv.storage.progress import Progress
from ckptconv.storage.reading import REQUESTS
from ckptconv.storage.stores import reached
from ckptconv.storage.writing import Writer
from ckptconv.tensors.lazy import Stored
from ckptconv.tensors.moves import BLOCK

# The module whose `in_processes` carries out tasks in processes. Without it, threads do.
PROCESSES: tuple[str, ...] = (
    "ckptconv.features.processes.forking",
)  # fmt: skip
# Parts of fewer bytes than this on average mean very many short reads and writes.
_SHORT = 16 << 10
_Work_contra = TypeVar("_Work_contra", contravariant=True)


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
    forked: bool = False,
) -> Tally:
    """Write `file` with `writer`.

    `memory` (bytes) bounds the buffers of all `jobs` threads together; `jobs` None means as many as are useful. At most
    `requests` requests to remote files run at a time. `seen` is called, by any of the threads, with every piece of data
    that is read. If `digests` is given, the CRC-32 of every tensor that is not empty is put into it, by name. `forked`:
    the file is worth processes (`worth_processes`), rather than threads.
    """
    digesting = file.digested or digests is not None
    far = any(map(is_read_far, file.inputs()))
    if far or not writer.positioned or file.size <= BLOCK:
        jobs = 1  # in order, or there is nothing to share
    jobs = jobs or _threads(file)
    # A worker holds at most four buffers of this size.
    unit = max(min(BLOCK, memory // jobs // 4, file.size + ALIGNMENT) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    tile = 0 if far else max(memory // jobs - 2 * unit, unit)
    queue = partial(tasks, file, unit, writer.positioned, tile, jobs > 1)
    start = partial(Worker, writer=writer, unit=unit, digesting=digesting, seen=seen)
    ended: Sequence[Done] = ()
    if jobs > 1 and writer.shared and forked:
        ended = in_processes(queue, [partial(start, readers)] * jobs, progress)
    if far:
        reaching = reached(file.name)
        with reaching.prefetching(readers, reaching.needs(unit), memory=memory, requests=requests) as prefetch:
            worker = start(prefetch)
            _take(prefetch.over(queue()), worker, progress)
        worker.tally.bytes_read += prefetch.bytes_fetched
        ended = [worker.done()]
    elif not ended:
        workers = [start(readers) for _ in range(jobs)]
        if jobs == 1:
            _take(queue(), workers[0], progress)
        else:
            from ckptconv.engine.threads import in_threads

            in_threads(queue(), workers, progress)
        ended = [worker.done() for worker in workers]
    total = Tally()
    for done in ended:
        total.add(done.tally)
    if digesting:
        from ckptconv.engine.crcs import finish

        written = set[int]().union(*(done.trailers for done in ended))
        known = (done.crcs for done in ended)
        total.bytes_written += finish(file, writer, known, written, {} if digests is None else digests)
    return total


def in_processes(
    queue: Callable[[], Iterator[Any]], workers: Sequence[Callable[[], Any]], progress: Progress | None
) -> list[Any]:
    """Carry out the tasks of `queue()`, the same each time, in a process for each of `workers`, which the process
    calls. Return the results of each; nothing if no process could be started: no task is done then."""
    for module in PROCESSES:
        results: list[Any] = import_module(module).in_processes(queue, workers, progress)
        return results
    return []


def worth_processes(file: FilePlan, seen: Seen | None) -> bool:
    """Return whether to use processes, not threads, for `file`: most of it is computed from files that each process can
    read itself, the data need not be `seen` here, and this process may be forked. Each packed file is for one tensor,
    so that no two processes unpack one."""
    if seen or not is_forkable():
        return False
    data = [part for part in file.parts if type(part) is Data]
    if {type(part.tensor) for part in data} <= {Stored}:
        return False
    computed = sum(part.nbytes for part in data if part.tensor.computed)
    if computed <= file.size // 2:
        return False
    tensors = (part.tensor for part in file.parts if not isinstance(part, (Literal, Trailer)))
    packed = Counter(source for tensor in tensors for source in set(tensor.inputs()) if source.packed)
    return max(packed.values(), default=1) == 1


def _threads(file: FilePlan) -> int:
    """Return the number of threads for one file.

    It is one if there are very many short reads and writes, and nothing is computed: threads would wait for each other
    around each.
    """
    return 1 if _is_of_short_parts(file) or is_scattered(file) else usual_threads()


def _is_of_short_parts(file: FilePlan) -> bool:
    return file.size < _SHORT * len(file.parts)


def is_scattered(file: FilePlan) -> bool:
    """Return whether most of `file` is moved data in another order, such as that of transposed matrices."""
    if _is_of_short_parts(file):
        return False
    moved = (part for part in file.parts if isinstance(part, Data) and not part.tensor.grain)
    return sum(part.nbytes for part in moved if part.tensor.scattered) > file.size // 2


def usual_threads() -> int:
    """Return the default number of threads: as many as processors, at most four."""
    return min(os.cpu_count() or 1, 4)


def _take(queue: Iterator[Task], worker: Worker, progress: Progress | None) -> None:
    for task in queue:
        size = worker.run(task)
        if progress:
            progress(size)
