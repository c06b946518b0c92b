"""The report of `thin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class ThinnedStep:
    """A step of a run."""

    name: str
    """The name of its directory in the run; for a step of files, the name of the file with the weights."""

    number: int | None
    """The number in its name; null if it has none."""

    time: float | None
    """When the last of its files changed, in seconds since 1970; null if the store does not say."""

    bytes: int
    """The total size of its files."""

    action: str
    """The action: keep, remove, or lessen, which reduces it to its weights and small files."""

    why: Sequence[str]
    """Why it is kept; empty if it is not."""

    done: bool = False
    """Whether the action was carried out; false for a kept step."""

    left_bytes: int | None = None
    """The total size of its files after the action; null for a delta that is not written yet."""

    lost: Sequence[str] = ()
    """Files, and parts of its checkpoint, that a reduced step loses, besides weights and optimizer states."""


@dataclass
class ThinReport:
    """The actions of `thin` on a run, or in a dry run the actions it would take."""

    input: str
    """The run."""

    path: str
    """The directory that contains its steps."""

    steps: Sequence[ThinnedStep]
    """The steps, the oldest first."""

    carried_out: bool
    """Whether the actions were carried out (--yes)."""

    kept_bytes: int
    """Bytes of the kept steps."""

    removed_bytes: int
    """Bytes of the removed and reduced steps, before the action."""

    beside: Mapping[str, str] = field(default_factory=dict)
    """Kept entries that have the number of a step, but do not count as steps: {name: why}."""

    finished: Sequence[str] = ()
    """Steps of an interrupted run of thin that this run finished."""

    warnings: Sequence[str] = ()
    """Warnings, one sentence each."""

    seconds: float = 0.0
    """Duration in seconds."""


# Title, what prints it, the commands, the class of the fields; then: the fields stand beside `ok`.
COMMANDS = {"thin": ("thin", "The output of `thin --json`.", ("thin",), ThinReport, "")}
# Constraints that the type of a field does not show.
MORE = {(ThinnedStep, "action"): {"enum": ["keep", "remove", "lessen"]}}
