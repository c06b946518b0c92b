"""Wait for the disk in threads of their own, while others write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from ckptconv.process import Thread, start_threads

# Files that are synced at a time.
_SYNCS = 8


class Syncing:
    """Runs steps that wait for the disk in threads of its own, so that the next files are written meanwhile.

    The file systems put what several threads wait for into one write of their journal. At most one more step is queued:
    if the process is killed, only these of the finished files lack a record. `add` may be called from any thread. As a
    context manager: after an exception it waits for the current steps and skips the rest.

    A signal may raise an exception in the main thread at any instruction of Python. These queues are whole even then:
    `queue.Queue` would hold a step that no thread is woken for.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Has an entry when the next step may be queued.
        self._room: SimpleQueue[None] = SimpleQueue()
        self._room.put(None)
        self._threads: list[Thread] = []
        self._starting = threading.Lock()
        self._failure: BaseException | None = None
        self._stopped = False

    def add(self, step: Callable[[], None]) -> None:
        """Queue `step`."""
        with self._starting:
            if len(self._threads) < _SYNCS:
                # Known before it starts: a signal that comes meanwhile is raised by `start_threads`.
                self._threads.append(Thread(self._work))
                start_threads(self._threads[-1:])
        if not self._running:  # the system allows no more threads
            step()
            return
        self._room.get()
        self._waiting.put(step)

    def finish(self) -> None:
        """Wait until every step has run. Raises the error of a step that failed.

        A signal may interrupt it, and have it called again.
        """
        for _ in self._running:
            self._waiting.put(None)
        for thread in self._running:
            thread.join()
        self._threads, self._waiting = [], SimpleQueue()
        if self._failure is not None:
            raise self._failure

    @property
    def _running(self) -> list[Thread]:
        return [thread for thread in self._threads if thread.ident is not None]

    def _work(self) -> None:
        for step in iter(self._waiting.get, None):
            self._room.put(None)
            try:
                if not self._stopped:
                    step()
            except BaseException as error:
                self._failure = error
                self._stopped = True

    def __enter__(self) -> Syncing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped |= kind is not None
        self.finish()
