"""Servers that all tests of a process share, closed when it ends."""

from __future__ import annotations

import atexit
import contextlib
from typing import TypeVar

T = TypeVar("T")

_OPEN = contextlib.ExitStack()
atexit.register(_OPEN.close)


def at_exit(manager: contextlib.AbstractContextManager[T]) -> T:
    """Enter a context that is left when this process ends."""
    return _OPEN.enter_context(manager)
