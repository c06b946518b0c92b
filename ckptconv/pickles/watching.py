"""The observers of names and calls in pickles: the watcher of their readings, and the judge of the objects of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from ckptconv.pickles.nodes import Global, Opaque


class PickleReading(NamedTuple):
    """A reading of a pickle, which `where` names: the names that it calls and that are not known to be data
    (`called`), those of the tables that it mentions (`suspects`), the names that it mentions and that no table lists
    (`unknown`), the calls that were not reviewed, in words (`unknown_calls`), and its `value`; None if `broken`."""

    where: str
    called: tuple[Global, ...]
    suspects: tuple[Global, ...]
    unknown: tuple[Global, ...]
    unknown_calls: tuple[str, ...]
    broken: bool
    value: Any


class Judge(Protocol):
    """Judges the objects of one pickle as they are made: `unknown` names, and `unknown_calls`, in words."""

    unknown: dict[Global, None]
    unknown_calls: dict[str, None]

    def mention(self, name: Global) -> None: ...
    def put(self, values: Iterable[Any]) -> None: ...
    def call(self, function: Any, args: tuple[Any, ...], how: str, kwargs: dict[str, Any] | None) -> None: ...
    def build(self, target: Opaque, state: Any) -> None: ...
    def items(self, target: Any, items: list[Any]) -> None: ...
    def append(self, target: Any, items: list[Any]) -> None: ...


class _Watcher(NamedTuple):
    by: Callable[[PickleReading], None]
    judge: Callable[[int], Judge] | None


_watching: ContextVar[_Watcher | None] = ContextVar("watching", default=None)


@contextlib.contextmanager
def watched(by: Callable[[PickleReading], None], judge: Callable[[int], Judge] | None = None) -> Iterator[None]:
    """While active, call `by` with the reading of each pickle: before an attack is refused, and for broken ones too.
    `judge` returns the judge of a pickle of so many bytes."""
    token = _watching.set(_Watcher(by, judge))
    try:
        yield
    finally:
        _watching.reset(token)


def judge(size: int) -> Judge | None:
    """Return the judge of a pickle of `size` bytes, if a watcher provides one."""
    watcher = _watching.get()
    return watcher.judge(size) if watcher is not None and watcher.judge is not None else None


def report(reading: Callable[[], PickleReading]) -> None:
    """Pass the reading of a pickle to the watcher (`watched`), if there is one."""
    watcher = _watching.get()
    if watcher is not None:
        watcher.by(reading())
