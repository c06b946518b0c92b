"""Python's search for garbage, kept away from the many objects that describe a large checkpoint, and all live on."""

from __future__ import annotations

import contextlib
import gc
import re
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


def spare_memory() -> None:
    """Have the C library give back what is freed, and all threads share its pool: some 5 MiB less.

    For a process of our own, and as far as its C library is GNU's.
    """
    with contextlib.suppress(Exception):
        import ctypes

        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 18), (_TRIM_THRESHOLD, 1 << 18)):
            mallopt(parameter, value)


# Source: malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def peak_rss() -> int:
    """The most memory this process has held, in bytes; 0 where the system does not tell.

    Read from /proc: what getrusage says survives fork and exec, and so may be the parent's.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            match = re.search(r"^VmHWM:\s*(\d+) kB", status.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0
