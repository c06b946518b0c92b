"""Convert inputs in a process of its own, one after the other, for `running`.

It is sent tasks and sends messages: ("total", bytes), ("done", bytes), ("file", name) while it works, then ("ended",
Report or CkptconvError). It ends when the connection is closed, or with the first signal.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from ckptconv.cli import signals
from ckptconv.errors import StoppedError
from ckptconv.process import settled, spare_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from ckptconv.errors import CkptconvError
    from ckptconv.result import Report

# Seconds between two messages about bytes.
_INTERVAL = 0.1


@settled()
def attempt(
    source: str, output: str, options: dict[str, Any], progress: Any, on_total: Callable[[int], object]
) -> Report | CkptconvError:
    """Convert; return the report, or the error. From the commit on, signals are held."""
    try:
        from ckptconv.conversion import convert

        return convert(source, output, progress=progress, on_total=on_total, before_commit=signals.hold, **options)
    except BaseException as error:
        from ckptconv.cli.failures import failure_of

        failure = failure_of(error)
        if failure is None:
            raise
        return failure
    finally:
        gc.collect()  # of new objects: the description of a large input would stay while the next one is converted


class _Told:
    """Progress that is sent to the parent process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._count, self._next = 0, 0.0

    def on_total(self, total: int) -> None:
        self._connection.send(("total", total))

    def on_file(self, name: str) -> None:
        self._connection.send(("file", name))

    def __call__(self, count: int) -> None:
        self._count += count
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            count, self._count = self._count, 0
            self._connection.send(("done", count))


def main(descriptor: int) -> None:
    """Work for the process at the other end of `descriptor`."""
    from multiprocessing.connection import Connection

    spare_memory()
    connection = Connection(descriptor)
    try:
        signals.raise_stopped()
        while True:
            source, output, options = connection.recv()
            connected = _Told(connection)
            ended = attempt(source, output, options, connected, connected.on_total)
            connection.send(("ended", ended))
            if isinstance(ended, StoppedError):
                return
            signals.release()
    except (EOFError, OSError, StoppedError):
        return
