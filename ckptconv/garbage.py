"""Python's search for garbage, kept away from the many objects that describe a large checkpoint, and all live on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Without the search for garbage, of which there is none: among millions of new objects it takes a third of the
    time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """With the search, but not among what there is already. Whoever has set objects aside for good keeps them so."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()
