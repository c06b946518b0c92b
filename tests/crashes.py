"""Kills and failing calls at any moment of a piece of work."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import TIMES

# What changes something on the disk.
CALLS = ("open", "pwrite", "write", "ftruncate", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


def in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a child process; how it ended."""
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def counted(at: int, act: Callable[[], None]) -> list[str]:
    """Have `act` called before the call to the system of this number, from 1; the list holds what was called."""
    made: list[str] = []

    def wrapped(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == at:
                act()
            return call(*arguments, **options)

        return counting

    for name in CALLS:
        setattr(os, name, wrapped(name))
    return made


def moments(made: list[str]) -> list[int]:
    """Numbers of calls before which to kill: of each kind the first, one in the middle, and the last. In a thorough
    run, of all."""
    if TIMES > 1:
        return [*range(1, len(made) + 1)]
    found = set()
    for name in CALLS:
        places = [number for number, each in enumerate(made, 1) if each == name]
        found |= set(places[:1] + places[len(places) // 2 :][:1] + places[-1:])
    return sorted(found)


def stepped(after: int) -> list[int]:
    """Have this process killed when so many functions were called; the list holds how many there were."""
    made = [0]

    def counting(frame: Any, event: str, argument: Any) -> None:
        made[0] += 1
        if made[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(counting)
    sys.setprofile(counting)
    return made


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, call: str, after: int, error: Exception) -> Iterator[None]:
    usual = getattr(os, call)
    left = [after]

    def refused(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return usual(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refused)
        yield
