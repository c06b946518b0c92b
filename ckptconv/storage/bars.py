"""Bars of tqdm and tasks of rich, which show the bytes of a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ckptconv.errors import UsageError
from ckptconv.text import brief


class _Shown(Protocol):
    """Shows the bytes of a call."""

    def begin(self, total: int) -> None:
        """Start, or start again, with `total` bytes to be done."""

    def add(self, count: int) -> None:
        """Show that `count` more bytes are done."""

    def end(self) -> None:
        """Close the bars that this object opened. The caller's bar stays open."""


class _Bars:
    """Shows bytes by a bar of tqdm: the caller's, or one of the caller's class."""

    def __init__(self, bar: Any, called: str) -> None:
        self._class: Any = bar if isinstance(bar, type) else None
        self._bar: Any = None if self._class else bar
        self._called = called

    def begin(self, total: int) -> None:
        if self._bar is not None:
            self._bar.reset(total)
        elif self._class is not None:
            self._bar = self._class(total=total, desc=self._called, unit="B", unit_scale=True)

    def add(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def end(self) -> None:
        if self._class is not None and self._bar is not None:
            self._bar.close()


class _Tasks:
    """Shows bytes by a task of a rich progress: the caller's, or one of the caller's class."""

    def __init__(self, tasks: Any, called: str) -> None:
        self._class: Any = tasks if isinstance(tasks, type) else None
        self._tasks: Any = None if self._class else tasks
        self._called = called
        self._task: Any = None

    def begin(self, total: int) -> None:
        if self._tasks is None and self._class is not None:
            self._tasks = self._class()
            self._tasks.start()
        if self._task is None:
            self._task = self._tasks.add_task(self._called, total=total)
        else:
            self._tasks.reset(self._task, total=total)

    def add(self, count: int) -> None:
        if self._task is not None:
            self._tasks.advance(self._task, count)

    def end(self) -> None:
        if self._class is not None and self._tasks is not None:
            self._tasks.stop()


@contextlib.contextmanager
def adapted(progress: Any, on_total: Callable[[int], object] | None, called: str) -> Iterator[tuple[Any, Any]]:
    """Yield the functions that a call takes as `progress` and `on_total`. `called` is the call's name."""
    bar = _shown_by(progress, called)
    if bar is None:
        yield progress, on_total
        return
    lock = threading.Lock()  # neither adds up what several threads do

    def add(count: int) -> None:
        with lock:
            bar.add(count)

    def begin(total: int) -> None:
        with lock:
            bar.begin(total)
        if on_total is not None:
            on_total(total)

    try:
        yield add, begin
    finally:
        bar.end()


def _shown_by(progress: Any, called: str) -> _Shown | None:
    """Return the object that shows bytes by `progress`; None if that is a function."""
    if progress is True:
        from tqdm.auto import tqdm

        return _Bars(tqdm, called)
    if hasattr(progress, "add_task") and hasattr(progress, "advance"):
        return _Tasks(progress, called)
    if hasattr(progress, "update") and hasattr(progress, "reset"):
        return _Bars(progress, called)
    if callable(progress) and not isinstance(progress, type):
        return None
    raise UsageError(
        f"progress {brief(progress)} cannot show progress.",
        "Pass a function, a bar of tqdm or its class, a Progress of rich, or True.",
    )
