"""Counts what a piece of work takes in calls of functions: the same on every machine, however busy it is."""

from __future__ import annotations

import contextlib
import cProfile
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

# The program itself, which says at its end how often it forked. `before` runs before each fork.
COUNTED = """
import os, sys
from ckptconv.__main__ import main
fork, forks = os.fork, []
def counted():
    {before}
    pid = fork()
    forks.append(pid)
    return pid
os.fork = counted
try:
    main()
finally:
    print(len(forks), file=sys.stderr)
"""


def counted(work: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions, of Python's or of C's, are called in this thread while `work` runs; and what it returns."""
    profile = cProfile.Profile()
    result = profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats()), result


def calls(work: Callable[[], Any]) -> int:
    """How many functions are called in this thread while `work` runs."""
    return counted(work)[0]


def open_files() -> Counter[str]:
    """The files and directories that this process has open. `open_files() - before` are those it did not have before.

    Sockets are left out: connections of an earlier test to a store end when they have been idle for a while.
    """
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return Counter({path: count for path, count in found.items() if path.startswith("/")})
