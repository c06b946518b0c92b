"""Carry out tasks in processes that are forked for them.

Threads that compute wait for each other: numpy gives up the interpreter's lock for a few microseconds at a time, and
each handing over costs as much. Processes do not. They share all that this one has read and planned, and return only
their results. They claim tasks by numbers, which they read from a pipe. If this process is killed, there are no more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from ckptconv.errors import CkptconvError, FailedError
from ckptconv.process import kilobytes, note_forked, reuse_memory, settled
from ckptconv.storage.progress import Progress
from ckptconv.tensors.float_formats import numpy_module

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Bytes of the number of a task; and how many numbers each process has ahead of it, so that it need not wait.
_NUMBER, _AHEAD = 4, 2
_Task = TypeVar("_Task")
_Done = TypeVar("_Done")
_Task_contra = TypeVar("_Task_contra", contravariant=True)
_Done_co = TypeVar("_Done_co", covariant=True)


class Reporting(Protocol[_Task_contra, _Done_co]):
    """Carries out tasks, and can report its results to another process."""

    def run(self, task: _Task_contra, /) -> int:
        """Carry out `task`. Return the number of its bytes."""

    def done(self) -> _Done_co:
        """Return the results, as an object that can be pickled."""


class _Ended(NamedTuple):
    """The results of a process, and the bytes of memory of its own."""

    done: object
    memory: int


class _Raised(NamedTuple):
    """An exception, and its cause, which it loses on the way."""

    error: BaseException
    cause: BaseException | None


def in_processes(
    queue: Callable[[], Iterator[_Task]],
    workers: Sequence[Callable[[], Reporting[_Task, _Done]]],
    progress: Progress | None,
) -> list[_Done]:
    """Carry out the tasks of `queue()`, the same each time, in a process for each of `workers`, which it calls.

    Return the results of each. Return nothing if none can be started, as nothing is done then: the system allows no
    more, or this process has other threads, whose locks would never be released in a copy. Raise the first error of any
    of them, and FailedError if one is killed.
    """
    if threading.active_count() > 1:
        return []
    numpy_module()  # loaded here, the processes share it
    numbers, giving = os.pipe()
    started: dict[Connection, int] = {}
    try:
        # A signal comes before a process is started, or when all are known.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for worker in workers:
                if not _start(queue, worker, numbers, giving, started):
                    break
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        ended = _followed(started, giving, progress)
    except BaseException:
        # The files that they write are removed: the tasks need not end.
        for pid in started.values():
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(numbers)
        os.close(giving)
        for connection in started:
            connection.close()
        for pid in started.values():
            os.waitpid(pid, 0)
    note_forked(sum(end.memory for end in ended))
    return [cast("_Done", end.done) for end in ended]


def _start(
    queue: Callable[[], Iterator[_Task]],
    worker: Callable[[], Reporting[_Task, _Done]],
    numbers: int,
    giving: int,
    started: dict[Connection, int],
) -> bool:
    """Fork a process that carries out tasks, and add it to those `started`. Return whether the system allows it."""
    from multiprocessing.connection import Pipe

    with contextlib.ExitStack() as stack:
        try:
            receiving, sending = map(stack.enter_context, Pipe(duplex=False))
            with warnings.catch_warnings():
                # Python knows of threads of libraries, which hold nothing that is wanted here.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError:
            return False
        stack.pop_all()
    if pid:
        sending.close()
        started[receiving] = pid
        return True
    try:
        # Signals stay blocked: it ends when the process that started it says so, or ends.
        os.close(giving)
        for connection in (receiving, *started):
            connection.close()
        reuse_memory()
        with settled():
            _work(queue(), worker, numbers, sending)
    finally:
        os._exit(0)


def _work(
    queue: Iterator[_Task], worker: Callable[[], Reporting[_Task, _Done]], numbers: int, sending: Connection
) -> None:
    """Carry out tasks of `queue`, whose numbers come from `numbers`. Send the size of each, then the results, or the
    error."""
    try:
        working, at = worker(), 0
        while number := os.read(numbers, _NUMBER):
            index = int.from_bytes(number, "little")
            task = next(itertools.islice(queue, index - at, None), None)
            if task is None:
                break
            at = index + 1
            sending.send(working.run(task))
        sending.send(_Ended(working.done(), _own_memory()))
    except BrokenPipeError:
        pass  # the reader has gone
    except BaseException as error:
        _send_error(error, sending)


def _own_memory() -> int:
    """Return the most memory that this process, which was forked, has held and does not share with others, in bytes."""
    status, mapped = kilobytes("status"), kilobytes("smaps_rollup")
    # Memory that was given back since was not shared either.
    resident = status.get("VmRSS", 0)
    private = mapped["Private_Clean"] + mapped["Private_Dirty"] if "Private_Dirty" in mapped else resident
    return private + status.get("VmHWM", resident) - resident << 10


def _send_error(error: BaseException, sending: Connection) -> None:
    """Send `error` and its cause; that of a mistake is where it was made."""
    cause = error.__cause__
    if not isinstance(error, (CkptconvError, MemoryError, OSError)):
        cause = RuntimeError(traceback.format_exc())
        if type(error).__module__ != "builtins":  # other errors may be impossible to send
            error = RuntimeError(f"{type(error).__name__}: {error}")
    sending.send(_Raised(error, cause))


def _followed(started: dict[Connection, int], giving: int, progress: Progress | None) -> list[_Ended]:
    """Give the processes as many numbers as they use, and return their results."""
    from multiprocessing.connection import wait

    numbers = itertools.count()

    def give(count: int) -> None:
        # Without end: a process ends with the first number that is none of a task's, and there is one for each.
        os.write(giving, b"".join(next(numbers).to_bytes(_NUMBER, "little") for _ in range(count)))

    give(_AHEAD * len(started))
    ended: dict[Connection, _Ended] = {}
    while len(ended) < len(started):
        for connection in cast("list[Connection]", wait([pipe for pipe in started if pipe not in ended])):
            message = _heard(connection)
            if isinstance(message, _Ended):
                ended[connection] = message
                continue
            give(1)
            if progress:
                progress(message)
    return list(ended.values())


def _heard(connection: Connection) -> int | _Ended:
    """Return the next message of a process. Raise its error, and FailedError if it has ended without a message."""
    try:
        message: int | _Ended | _Raised = connection.recv()
    except EOFError:
        raise FailedError(
            "A worker process was killed, perhaps for lack of memory.",
            "Lower --memory or --jobs.",
        ) from None
    if isinstance(message, _Raised):
        raise message.error from message.cause
    return message
