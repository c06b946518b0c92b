"""The report of `thin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class ThinnedStep:
    """A step of a run."""

    name: str
    """The name of its directory in the run; of a step of files, that of the file with the weights."""

    number: int | None
    """The number in its name; null if it has none."""

    time: float | None
    """When the last of its files changed, in seconds since 1970; null if the store does not say."""

    bytes: int
    """The sizes of its files, together."""

    action: str
    """The action on the step: keep, remove, or lessen, which reduces the step to its weights and small files."""

    why: Sequence[str]
    """The reasons why the step stays; empty if it does not."""

    done: bool = False
    """Whether the action was carried out; false for steps that stay."""

    left_bytes: int | None = None
    """Size of the files that are left of the step, or would be; null for a delta that is not written yet."""

    lost: Sequence[str] = ()
    """Files, and parts of its checkpoint, that a reduced step loses together with the optimizer, although they hold
    neither its states nor weights."""


@dataclass
class ThinReport:
    """The actions of `thin` on a run, or in a dry run the actions it would take."""

    input: str
    """The run."""

    path: str
    """The directory in which its steps are."""

    steps: Sequence[ThinnedStep]
    """The steps, the oldest first."""

    carried_out: bool
    """Whether the actions were carried out, as with --yes."""

    kept_bytes: int
    """Bytes of the steps that stay."""

    removed_bytes: int
    """Bytes of the steps that go or are reduced, as they are before."""

    beside: Mapping[str, str] = field(default_factory=dict)
    """Entries with the number of a step that do not count as steps, and stay: {name: reason}."""

    finished: Sequence[str] = ()
    """Steps that an earlier run had begun, and that were finished now."""

    warnings: Sequence[str] = ()
    """Warnings, one sentence each."""

    seconds: float = 0.0
    """Duration in seconds."""


# Title, what prints it, the commands, the class of the fields; then: the fields stand beside `ok`.
COMMANDS = {"thin": ("thin", "The output of `thin --json`.", ("thin",), ThinReport, "")}
# Constraints that the type of a field does not show.
MORE = {(ThinnedStep, "action"): {"enum": ["keep", "remove", "lessen"]}}
