"""The order of the steps of a run, by the numbers in their names: what --ema counts first is the oldest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.runs.names import lone_number, number_of, series_of
from ckptconv.text import some

_MOST_NAMES = 50


class _Place(NamedTuple):
    """The number of a step, and the common part of the paths of all steps of its run."""

    number: int
    run: tuple[str, ...]


def check_order(steps: Sequence[str]) -> None:
    """Raise UsageError if a step of a run comes before one of the same run with a smaller number."""
    places = [next(_places(step), None) for step in steps]
    for (step, place), (later, other) in itertools.pairwise(zip(steps, places, strict=True)):
        if place and other and place.run == other.run and place.number > other.number:
            run = {path: at.number for path, at in zip(steps, places, strict=True) if at and at.run == place.run}
            ordered = sorted(run, key=lambda path: run[path])
            raise UsageError(
                f"--ema treats the first STEP as the oldest, but {step} was given before {later}. Shells sort names as "
                "text.",
                f"The order by number is {some(ordered, _MOST_NAMES, str)}. --weights accepts any order.",
            )


def _places(path: str) -> Iterator[_Place]:
    """Yield the places in a path whose names give the number of a step, the surest first."""
    names = path.rstrip("/").split("/")
    for number in (number_of, lone_number):
        for at in reversed(range(len(names))):
            if (value := number(names[at])) is not None:
                yield _Place(value, (*names[:at], series_of(names[at]), *names[at + 1 :]))
