"""A conversion in parts: which files are whose, with no coordination between those who make them. Pure."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence

from ckptconv.errors import UsageError

# Where batch systems say which of how many a process is: its number, the lowest number there is, and how many there
# are. Of each the first that is set counts.
_SYSTEMS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("a Slurm array", ("SLURM_ARRAY_TASK_ID",), ("SLURM_ARRAY_TASK_MIN",), ("SLURM_ARRAY_TASK_COUNT",)),
    ("torchrun", ("RANK",), (), ("WORLD_SIZE",)),
    (
        "a Kubernetes indexed job",
        ("JOB_COMPLETION_INDEX",),
        (),
        ("JOB_COMPLETIONS", "COMPLETIONS", "JOB_PARALLELISM", "PARALLELISM"),
    ),
)


def parse_part(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """The part that `text` names: "I/N", or "auto" for what a batch system has put into the environment.

    Raises UsageError where it names none.
    """
    if text == "auto":
        return _from_environment(environment)
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match:
        raise UsageError(f"--part {text}: expected I/N, such as 0/4, or auto.")
    return _checked(int(match[1]), int(match[2]), f"--part {text}")


def _from_environment(environment: Mapping[str, str]) -> tuple[int, int]:
    for system, numbers, lowest, counts in _SYSTEMS:
        number = _first(environment, numbers)
        if number is None:
            continue
        count = _first(environment, counts)
        if count is None:
            raise UsageError(
                f"--part auto: {numbers[0]} is set, as in {system}, and {' or '.join(counts)} is not.",
                "Set it to how many there are, or give --part I/N.",
            )
        return _checked(number - (_first(environment, lowest) or 0), count, f"--part auto, from {numbers[0]}")
    names = ", ".join(f"{numbers[0]} ({system})" for system, numbers, _, _ in _SYSTEMS)
    raise UsageError(f"--part auto: none of these is set: {names}.", "Give --part I/N.")


def _first(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    for name in names:
        value = environment.get(name)
        if value:
            if not re.fullmatch(r"\d{1,9}", value):
                raise UsageError(f"--part auto: {name} is {value!r}, where a number was expected.")
            return int(value)
    return None


def _checked(number: int, count: int, where: str) -> tuple[int, int]:
    if not 0 <= number < count:
        raise UsageError(
            f"{where}: there is no part {number} of {count}.",
            f"Parts are counted from 0: 0/{count} to {count - 1}/{count}." if count else "",
        )
    return number, count


def assign(sizes: Sequence[int], count: int, shift: int = 0) -> list[int]:
    """For each file its part, of `count`: the largest first, each to the part that has the least so far.

    `shift` has another part begin: outputs of one file each are not all made by the first.
    """
    # However many parts there are, no more of them get a file than there are files.
    filled = [(0, part) for part in range(min(count, len(sizes)))]
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size, part = filled[0]
        found[index] = (part + shift) % count
        heapq.heapreplace(filled, (size + sizes[index], part))
    return found
