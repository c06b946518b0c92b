"""The number of a process's part, and of all parts: from the user, or from a batch system."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.text import brief, whole

_SRUN = "tasks of srun"
# Variables in which batch systems give the number of a process, the lowest number, and the number of processes. Of each
# the first that is set counts.
_SYSTEMS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("a Slurm array", ("SLURM_ARRAY_TASK_ID",), ("SLURM_ARRAY_TASK_MIN",), ("SLURM_ARRAY_TASK_COUNT",)),
    ("torchrun", ("RANK",), (), ("WORLD_SIZE",)),
    (
        "a Kubernetes indexed job",
        ("JOB_COMPLETION_INDEX",),
        (),
        ("JOB_COMPLETIONS", "COMPLETIONS", "JOB_PARALLELISM", "PARALLELISM"),
    ),
    # A batch script has the first of these too, and runs once: only the tasks of srun have both.
    (_SRUN, ("SLURM_PROCID",), (), ("SLURM_STEP_NUM_TASKS",)),
)


def parse_part(value: Any, option: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the part that `value` names: "I/N", (I, N), or "auto" for that of a batch system in the environment.

    Raises UsageError, naming `option`, if it names none.
    """
    if isinstance(value, str) and value == "auto":
        return _part_of_system(option, environment)
    shown = value if isinstance(value, str) else brief(value)
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value)
        value = tuple(map(int, match.groups())) if match else ()
    numbers = [whole(number_of) for number_of in value] if isinstance(value, (tuple, list)) else []
    number, count = numbers if len(numbers) == 2 else (None, None)
    if number is None or count is None:
        raise UsageError(f"{option} {shown}: expected I/N, such as 0/4, or auto.")
    return _checked_part(number, count, f"{option} {shown}")


def _part_of_system(option: str, environment: Mapping[str, str]) -> tuple[int, int]:
    for system, numbers, lowest, counts in _SYSTEMS:
        number = _first(option, environment, numbers)
        if number is None:
            continue
        count = _first(option, environment, counts)
        if count is None:
            how = "Run it with srun" if system == _SRUN else "Set it to the number of parts"
            raise UsageError(
                f"{option} auto: {numbers[0]} is set, as in {system}, but {' or '.join(counts)} is not.",
                f"{how}, or use {option} I/N.",
            )
        lowest_number = _first(option, environment, lowest) or 0
        return _checked_part(number - lowest_number, count, f"{option} auto, from {numbers[0]}")
    names = ", ".join(f"{numbers[0]} ({system})" for system, numbers, _, _ in _SYSTEMS)
    raise UsageError(f"{option} auto: none of these variables is set: {names}.", f"Use {option} I/N.")


def _first(option: str, environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = environment.get(name)
        if value:
            if not re.fullmatch(r"\d{1,9}", value):
                raise UsageError(f"{option} auto: {name} is {value!r}, but a number was expected.")
            return int(value)
    return None


def _checked_part(number: int, count: int, where: str) -> tuple[int, int]:
    if not 0 <= number < count:
        raise UsageError(
            f"{where}: part {number} of {count} does not exist.",
            f"Parts are numbered from 0: 0/{count} to {count - 1}/{count}." if count > 0 else "",
        )
    return number, count
