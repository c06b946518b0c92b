"""The option of conversions about parts."""

from __future__ import annotations

from typing import Any

from ckptconv.options import RUNNING
from ckptconv.options.kinds import ValueKind
from ckptconv.options.option import Given, option


def _part(value: Any, called: str) -> tuple[int, int] | None:
    """Return (I, N) of a value such as 0/4. Raise UsageError, naming the option as it is `called`, if it has none."""
    from ckptconv.features.parts.numbers import parse_part

    return None if value == "" else parse_part(value, called)


class PartOptions(Given):
    """The part of the output that this process converts."""

    part: tuple[int, int] | None = option(
        ValueKind(_part, stored=list, accepts="tuple[int, int] | list[int] | str"),
        "Convert part I (from 0) of N, and leave it staged for `finish`. With auto, I and N come from the "
        "environment of a Slurm array, srun, torchrun or Kubernetes.",
        metavar="I/N",
        group=RUNNING,
    )


GIVEN = PartOptions
