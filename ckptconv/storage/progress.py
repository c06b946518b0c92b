"""Values of `progress`: a function, a bar of tqdm, a progress of rich, or True.

The library itself writes to no terminal and to no notebook: the caller's objects do. Bars show bytes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from ckptconv.errors import UsageError
from ckptconv.text import brief

# A function that is called with the bytes done since the last call, from any thread.
Progress: TypeAlias = Callable[[int], object]


class Bar(Protocol):
    """A bar of tqdm, as far as it is used."""

    def update(self, n: int, /) -> object: ...
    def reset(self, total: int, /) -> object: ...


class Tasks(Protocol):
    """A `rich.progress.Progress`, as far as it is used."""

    def add_task(self, description: str, /, *, total: float | None) -> Any: ...
    def advance(self, task_id: Any, advance: float, /) -> object: ...


# A function that is called with the bytes done since the last call; a bar, the class of one, or rich's progress; True
# for a bar of tqdm's for wherever the program runs; False or None for nothing.
AnyProgress: TypeAlias = "bool | Callable[[int], object] | Callable[..., Bar] | Bar | Callable[..., Tasks] | Tasks"


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


class Announced:
    """Passes counts on, `total` bytes altogether: it stops when they are reached, and `finish` adds those that lack.

    For work that counts about as much as was announced. Any thread may call it.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._left = total
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            count = min(count, self._left)
            self._left -= count
        if self._progress and count:
            self._progress(count)

    def finish(self) -> None:
        """Pass on the bytes that lack."""
        self(self._left)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def shown(function: _Function) -> _Function:
    """Decorate a library function: it gets a function as `progress`, for any `AnyProgress` of its caller.

    Raise UsageError for anything else, and for an `on_total` or `before_commit` that is no function.
    """

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        for name in ("on_total", "before_commit"):
            if keywords.get(name) is not None and not callable(keywords[name]):
                raise UsageError(f"{name} {brief(keywords[name])} is not a function.")
        if "progress" not in keywords:
            return function(*args, **keywords)
        with _adapted(keywords["progress"], keywords.get("on_total"), function.__name__) as (progress, on_total):
            return function(*args, **{**keywords, "progress": progress, "on_total": on_total})

    return call  # type: ignore[return-value]


def counter(progress: AnyProgress | None) -> Progress | None:
    """Return the `progress` of a function that `shown` decorates, typed as the function that it is there."""
    return cast("Progress | None", progress)


def on_file(progress: Progress | None, name: str) -> None:
    """Tell `progress`, if it has a method `on_file`, which file or step begins."""
    tell = getattr(progress, "on_file", None)
    if tell:
        tell(name)


@contextlib.contextmanager
def _adapted(progress: Any, on_total: Callable[[int], object] | None, called: str) -> Iterator[tuple[Any, Any]]:
    """Yield the functions that a call takes as `progress` and `on_total`. `called` is the call's name."""
    bar = None if progress is None or progress is False else _shown_by(progress, called)
    if bar is None:
        yield None if progress is False else progress, on_total
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
        "Give a function, a bar of tqdm or its class, a Progress of rich, or True.",
    )
