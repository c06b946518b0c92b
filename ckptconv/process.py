"""Garbage collection, memory, threads and features of this process."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ckptconv.errors import CkptconvError, UsageError

# New objects after which garbage is collected in a process of our own: the usual 700 take a thirtieth of a start.
_MADE = 10_000
# Small stacks for threads: eight of the usual 8 MiB would count as 64 MiB of memory.
STACK = 512 << 10


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
    with _Settled.lock:
        # Only the first caller asks: the frozen objects are counted one by one, some ms for each million.
        if not _Settled.within and gc.get_freeze_count() == 0:
            gc.freeze()
            _Settled.ours = True
        _Settled.within += 1
    try:
        yield
    finally:
        with _Settled.lock:
            _Settled.within -= 1
            if not _Settled.within and _Settled.ours:
                gc.unfreeze()
                _Settled.ours = False


class _Settled:
    """The number of callers within `settled`, in all threads, and whether `settled` has frozen the objects."""

    lock, within, ours = threading.Lock(), 0, False


def spare_memory() -> None:
    """Have the C library give back freed memory, and all threads share its pool: this saves some 5 MiB.

    Call this only in a process of our own. It works only with the GNU C library.
    """
    _share_pool(_RECEIVED, 1 << 22)


def reuse_memory() -> None:
    """Have the C library keep up to 8 MiB of freed memory, in a pool of all threads, for arrays of less than 2 MiB.

    Threads that make and free arrays otherwise spend most of their time on page faults. Call this only in a process of
    our own. It works only with the GNU C library.
    """
    _share_pool(_LARGEST_REUSED, _MOST_KEPT)


def _share_pool(mapped: int, kept: int) -> None:
    """Have all threads share a pool of memory; allocations of `mapped` bytes or more, and free memory beyond `kept`
    bytes at its end, are given back."""
    with contextlib.suppress(Exception):
        import ctypes

        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, mapped), (_TRIM_THRESHOLD, kept)):
            mallopt(parameter, value)


# Source: malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Bytes: just more than the 256 KiB into which asyncio receives, which would otherwise be mapped for each piece.
_RECEIVED = (1 << 18) + (1 << 14)
# Bytes: larger than any array of a block, and than all of them together.
_LARGEST_REUSED, _MOST_KEPT = 1 << 21, 1 << 23


class _Known:
    """Facts of this process: whether it is our own, and not that of a program that uses the library; and the most
    memory, in bytes, that processes which it forked have held in addition."""

    ours = False
    forked = 0


def make_ours() -> None:
    """Declare this process our own: it does nothing but the work of ckptconv."""
    _Known.ours = True
    # Imports make many objects, of which hardly any is garbage.
    gc.set_threshold(_MADE)


def leave_garbage() -> None:
    """Have the interpreter free the remaining objects without a search for garbage, as a process of our own ends."""
    gc.freeze()


def is_forkable() -> bool:
    """Return whether this process may be forked: it is our own, on Linux. Libraries of macOS do not survive a fork."""
    return _Known.ours and sys.platform == "linux"


def peak_rss() -> int:
    """Return the most memory of this process and those that it forked, in bytes; 0 if the system does not report it.

    Read from /proc, because the value of getrusage survives fork and exec, and so may be the parent's.
    """
    peak = kilobytes("status").get("VmHWM", 0) << 10
    return peak + _Known.forked if peak else 0


def note_forked(memory: int) -> None:
    """Note that forked processes have together held `memory` bytes of their own."""
    _Known.forked = max(_Known.forked, memory)


def kilobytes(name: str) -> dict[str, int]:
    """Return the figures of a file in /proc/self; none if the system has no such file."""
    try:
        with open(f"/proc/self/{name}", encoding="ascii", errors="replace") as file:
            return {key: int(size) for key, size in re.findall(r"^(\w+):\s*(\d+) kB", file.read(), re.MULTILINE)}
    except OSError:
        return {}


class EndedError(Exception):
    """The work of this thread is to end, for a reason that another thread knows."""


class _Heard(threading.local):
    """The signal to the work of this thread that it is to end."""

    stop: threading.Event | None = None


_heard = _Heard()


def heed(stop: threading.Event) -> None:
    """Have `go_on` of this thread look at `stop`."""
    _heard.stop = stop


def go_on() -> None:
    """Raise EndedError if the work of this thread is to end: long computations call this once in a while."""
    if _heard.stop is not None and _heard.stop.is_set():
        raise EndedError


class Thread(threading.Thread):
    """A daemon thread that runs `target`. A signal that interrupts `join` does no harm: call it again."""

    def __init__(self, target: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        # A bare lock, held while it runs: `threading.Event` stays locked if a signal interrupts it at the wrong moment.
        self._run, self._running, self._done = target, threading.Lock(), False
        self._running.acquire()

    def run(self) -> None:
        try:
            self._run()
        finally:
            self._done = True
            self._running.release()

    def join(self, timeout: float | None = None) -> None:
        # Before Python 3.13, an interrupted join() takes a thread that still runs for one that has ended.
        if not self._done and self._running.acquire(timeout=-1 if timeout is None else timeout):
            self._running.release()
        if self._done:
            super().join(timeout)


def start_threads(threads: Sequence[Thread]) -> list[Thread]:
    """Start `threads`, with small stacks. Return those that run: fewer if the system allows no more."""
    import signal  # its numbers are an enumeration, which takes longer than all the rest here

    started = []
    usual = threading.stack_size(STACK)
    # Block signals while the threads start: a signal comes before or after, and never to one of them.
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass
    finally:
        threading.stack_size(usual)
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    return started


@functools.cache
def has_feature(feature: str) -> bool:
    """Return whether a feature is installed, without importing it."""
    spec = find_spec(f"ckptconv.features.{feature}")
    return spec is not None and spec.origin is not None  # a folder without modules may have been left behind


def of_feature(feature: str, name: str) -> Any:
    """Return the module `name` of a feature; None if the feature is not installed."""
    module = f"ckptconv.features.{feature}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None


def lacking(subject: str, feature: str, hint: str = "", error: type[CkptconvError] = UsageError) -> CkptconvError:
    """Return the error for a `subject` that needs a feature which is not installed."""
    return error(f"{subject} needs the feature {feature}, which is not installed.", hint)


def needed(feature: str, name: str, subject: str, hint: str = "", error: type[CkptconvError] = UsageError) -> Any:
    """Return the module `name` of a feature. Raise the error of `lacking` if the feature is not installed."""
    module = of_feature(feature, name)
    if module is None:
        raise lacking(subject, feature, hint, error)
    return module
