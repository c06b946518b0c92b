"""Whether attacks are refused, or read as inert data. Readers of pickles recognize an attack by `attacks`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_refusing: ContextVar[bool] = ContextVar("refusing", default=False)


@contextlib.contextmanager
def refusing_attacks(wanted: bool = True) -> Iterator[None]:
    """While active and `wanted`, reading an attack raises UnsafeError. Otherwise it is read as inert data."""
    token = _refusing.set(wanted)
    try:
        yield
    finally:
        _refusing.reset(token)


def attacks_are_refused() -> bool:
    """Whether reading an attack raises an error, because `refusing_attacks` is active."""
    return _refusing.get()
