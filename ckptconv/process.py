"""Garbage collection and memory of this process: the many objects that describe a large checkpoint all live on."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Turn garbage collection off: it finds nothing, and takes a third of the time among millions of new objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Collect garbage, but not among the objects that exist already. Objects that the caller has frozen stay so."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def spare_memory() -> None:
    """Have the C library give back freed memory, and all threads share its pool: this saves some 5 MiB.

    Call this only in a process of our own. It works only with the GNU C library.
    """
    with contextlib.suppress(Exception):
        import ctypes

        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 18), (_TRIM_THRESHOLD, 1 << 18)):
            mallopt(parameter, value)


# Source: malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def peak_rss() -> int:
    """Return the most memory this process has held, in bytes; 0 if the system does not tell.

    Read from /proc, because the value of getrusage survives fork and exec, and so may be the parent's.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            match = re.search(r"^VmHWM:\s*(\d+) kB", status.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0
