"""Carries out tasks in threads. Knows nothing of what they do."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from ckptconv.process import Thread, heed, start_threads
from ckptconv.storage.progress import Progress

_Work_contra = TypeVar("_Work_contra", contravariant=True)


class Working(Protocol[_Work_contra]):
    """Carries out tasks, in a thread of its own."""

    def run(self, task: _Work_contra, /) -> int:
        """Carry out `task`. Return the number of its bytes."""


def in_threads(
    queue: Iterator[_Work_contra],
    workers: Sequence[Working[_Work_contra]],
    progress: Progress | None,
    stop: threading.Event | None = None,
) -> None:
    """Carry out the tasks of `queue`, in a thread for each of `workers`. Raise the first error of any of them.

    `stop` is set when no further task may begin: long tasks check it themselves.
    """
    taking, stop = threading.Lock(), stop or threading.Event()
    failures: list[BaseException] = []

    def work(worker: Working[_Work_contra]) -> None:
        heed(stop)
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

    threads = [Thread(partial(work, worker)) for worker in workers]
    try:
        if not start_threads(threads):
            # No thread could be started: work in this one.
            work(workers[0])
            heed(threading.Event())
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    except BaseException:
        # A signal: let every thread leave its task before the staging area is removed.
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if failures:
        raise failures[0]
