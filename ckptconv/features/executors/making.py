"""Has the workers of an executor write the files of outputs, one task for each file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any, NamedTuple

from ckptconv.engine.checksums import Checksums
from ckptconv.errors import CkptconvError, FailedError, StoppedError, UsageError
from ckptconv.options.table import Options
from ckptconv.plan import Plan
from ckptconv.publish.jobs import Result, Task, make, packed_in
from ckptconv.storage.files import Readers
from ckptconv.storage.records import Records
from ckptconv.text import brief


class _Settings(NamedTuple):
    """The settings that another process needs for a task. `records` are for checksums; None if it checks none."""

    storage_options: Mapping[str, Any]
    spool_dir: str
    records: Mapping[str, Records] | None


def check(executor: object) -> None:
    """Raise UsageError if `executor` is none."""
    if not callable(getattr(executor, "submit", None)):
        raise UsageError(f"executor {brief(executor)} is not a concurrent.futures executor.")


def make_all(
    tasks: Sequence[Task],
    executor: Executor,
    options: Options,
    checksums: Checksums | None,
    note: Callable[[int, Result], None],
) -> None:
    """Write files in `executor`, the largest first. `note` is called with the number of each task and its result.

    Raise the error of a task, or FailedError if the executor does not carry them out.
    """
    known = _Settings(options.storage_options, options.spool_dir, checksums.records if checksums else None)
    futures = {}
    try:
        for number in sorted(range(len(tasks)), key=lambda number: -tasks[number].file.size):
            task = tasks[number]
            away = task._replace(staging=task.staging.elsewhere())
            futures[executor.submit(make_elsewhere, away, known)] = number
        waiting = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=1, return_when=FIRST_EXCEPTION)
            # Successes first: count the files made even if another task failed at the same time.
            for future in sorted(ended, key=_has_failed):
                result = future.result()
                if isinstance(result, CkptconvError):
                    raise result
                if checksums:
                    checksums.include(result.checked, result.extra_bytes, result.unrecorded)
                note(futures[future], result)
    except BaseException as error:
        for future in futures:
            future.cancel()
        if isinstance(error, Exception) and not isinstance(error, StoppedError):
            wait(futures)  # so that no task still writes once this has failed
        if isinstance(error, (CkptconvError, MemoryError)) or not isinstance(error, Exception):
            raise
        raise FailedError(
            f"The executor did not complete its tasks: {type(error).__name__}: {error}.",
            "Run the command again: finished files are kept.",
        ) from error


def _has_failed(future: Future[Any]) -> bool:
    return future.exception() is not None or isinstance(future.result(), CkptconvError)


def make_elsewhere(task: Task, known: _Settings) -> Result | CkptconvError:
    """Write a file completely in this process, which may be any.

    Errors are returned, not raised: not every executor can transport every exception unchanged.
    """
    try:
        return _made(task, known)
    except CkptconvError as error:
        return error
    except MemoryError:
        return FailedError(f"The worker does not have enough memory for {task.file.name}.")
    except Exception as error:
        return FailedError(f"{task.file.name} could not be written: {type(error).__name__}: {error}.")


def _made(task: Task, known: _Settings) -> Result:
    checksums = None if known.records is None else Checksums(known.records)
    plan = Plan((task.file,), "")
    with Readers(dict(known.storage_options), known.spool_dir) as readers, task.staging.opened():
        packed = packed_in([plan])
        if packed:
            readers.expect(packed)
        result, seal = make(task, readers, None, checksums)
        if checksums:
            checksums.check(readers, [plan])
            result.checked, result.extra_bytes = checksums.checked, checksums.extra_bytes
            result.unrecorded = tuple(checksums.unrecorded)
        seal()
        result.tally.bytes_read += readers.bytes_unpacked
    return result
