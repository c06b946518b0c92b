"""Regular expressions that come from a file, applied by Python's own `re` in a process of their own, with limits: one
can take exponential time, and only ending the process stops it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# CPU seconds, bytes of memory, and characters of a name; seconds for a machine that has no CPU for it.
MOST_SECONDS, _MOST_MEMORY, _LONGEST, LONGEST_WAIT = 2, 1 << 30, 1 << 16, 20
CHILD = """
import json, re, resource, sys, warnings
warnings.simplefilter("ignore")
seconds, memory, longest = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

def first(lists, names):
    known = []
    for at, patterns in enumerate(lists):
        known.append([])
        for number, pattern in enumerate(patterns):
            try:
                known[-1].append(re.compile(pattern).match)
            except (re.error, RecursionError, OverflowError) as error:
                return {"wrong": [at, number, str(error)]}
    return [[next((at for at, match in enumerate(own) if match(name)), None) for name in names] for own in known]

def renamed(names, prefix, rules):
    names = [name.removeprefix(prefix) for name in names]
    for rule in rules:
        pattern, _, replacement = rule.rpartition("=")
        change = re.compile(pattern).sub
        names = [change(replacement, name) for name in names]
        if any(len(name) > longest for name in names):
            sys.exit(1)
    return names

asked, arguments = json.load(sys.stdin)
json.dump({"first": first, "renamed": renamed}[asked](*arguments), sys.stdout)
"""


class ExpressionError(ValueError):
    """An expression of a list is none: `at` is the list's number, `number` its own, and the text says why."""

    def __init__(self, at: int, number: int, why: str) -> None:
        super().__init__(at, number, why)
        self.at, self.number, self.why = at, number, why

    def __str__(self) -> str:
        return self.why

    def __reduce__(self) -> tuple[type[ExpressionError], tuple[int, int, str]]:
        return type(self), (self.at, self.number, str(self))


class LimitsError(Exception):
    """Expressions could not be applied, or not within the limits."""


def first_matches(lists: Sequence[Sequence[str]], names: Sequence[str]) -> list[list[int | None]]:
    """Return, for each list of expressions, the number of the first that matches at the start of each name, if any.

    Raise ExpressionError for an expression that is none, LimitsError if it takes too long.
    """
    matches = _run("first", lists, names)
    if isinstance(matches, dict):
        raise ExpressionError(*matches["wrong"])
    return list(matches)


def renamed(names: Sequence[str], prefix: str, rules: Sequence[str]) -> list[str]:
    """Return the names as `selection.renamed` changes them. Raise LimitsError if the rules cannot be applied, or not in
    time."""
    return list(_run("renamed", names, prefix, rules))


def _run(function: str, *arguments: Any) -> Any:
    limits = map(str, (MOST_SECONDS, _MOST_MEMORY, _LONGEST))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", CHILD, *limits],
            input=json.dumps([function, arguments]).encode(),
            capture_output=True,
            timeout=LONGEST_WAIT,
            check=True,
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise LimitsError from error
