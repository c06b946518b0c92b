"""Values of `progress`: a function, a bar of tqdm, a progress of rich, or True.

The library itself writes to no terminal and to no notebook: the caller's objects do. Bars show bytes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
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


class Announced:
    """Passes counts on, up to `total` bytes altogether; `finish` adds the bytes that are missing.

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
        """Pass on the bytes that are missing."""
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
        progress = keywords["progress"]
        if progress is None or progress is False:
            return function(*args, **{**keywords, "progress": None})
        from ckptconv.storage.bars import adapted

        with adapted(progress, keywords.get("on_total"), function.__name__) as (progress, on_total):
            return function(*args, **{**keywords, "progress": progress, "on_total": on_total})

    return call  # type: ignore[return-value]


def counter(progress: AnyProgress | None) -> Progress | None:
    """Return the `progress` of a function that `shown` decorates, with its type in that function."""
    return cast("Progress | None", progress)


def on_file(progress: Progress | None, name: str) -> None:
    """Tell `progress`, if it has a method `on_file`, which file or step begins."""
    tell = getattr(progress, "on_file", None)
    if tell:
        tell(name)
