"""What `steps` says of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class StepSummary:
    """A step of a run."""

    name: str
    """The name of its directory in the run; of a step of files, that of the file with the weights."""

    path: str
    """Where it is."""

    number: int | None
    """The number in its name; null if it has none."""

    time: float | None
    """When the last of its files changed, in seconds since 1970; null if the store does not say."""

    format: str
    """Its format; empty if it could not be opened."""

    good: bool
    """Whether the bytes of every tensor are there, and no marker says that it was not finished; with --check, nothing
    has changed either, and with --stats, nothing is NaN."""

    whole: bool | None
    """Whether the bytes of every tensor are there, by its geometry; null if nothing that is read knows its format."""

    why: str
    """Why it is not whole, or not read; empty if it is."""

    marked: bool | None
    """Whether its markers say that it is complete; null if it has none."""

    marks: str
    """The markers that say so; or what says that it is not complete."""

    files: int
    """How many files it has."""

    bytes: int
    """The sizes of its files, together."""

    weights_bytes: int
    """Bytes of weights."""

    optimizer_bytes: int
    """Bytes of the optimizer's states."""

    rest_bytes: int
    """All other bytes of its files."""

    like: str
    """The step whose files have the same names and sizes, and that was opened in its place; empty if it was opened
    itself."""

    checked: int | None = None
    """How many digests and checksums were compared, with --check; null if none were asked for."""

    damage: str = ""
    """What a digest or checksum says that has changed, with --check."""

    nan: int | None = None
    """How many values are NaN, with --stats; null if that was not asked for."""

    inf: int | None = None
    """How many values are infinite, with --stats."""

    norm: float | None = None
    """The norm of all finite weights together, with --stats."""


@dataclass
class RunSummary:
    """What `steps` finds in the directory of a run."""

    input: str
    """The run."""

    path: str
    """The directory in which its steps are."""

    steps: Sequence[StepSummary] = ()
    """The steps, the oldest first."""

    last_good: str | None = None
    """The path of the last good step; null if none is good."""

    newest_is_good: bool = False
    """Whether the newest step is good."""

    named: Mapping[str, str] = field(default_factory=dict)
    """Files and links that name a step: {name: step}; an empty step is not there."""

    beside: Mapping[str, str] = field(default_factory=dict)
    """What has the number of a step, and does not count as one: {name: why}."""

    warnings: Sequence[str] = ()
    """What is cause for concern, each in a sentence."""

    seconds: float = 0.0
    """How long it took."""


# Title, what prints it, the commands, the class of the fields; then: the fields stand beside `ok`, and what that means.
COMMANDS = {
    "steps": (
        "steps",
        "The output of `steps --json`, even if the newest step is not good.",
        ("steps",),
        RunSummary,
        "surveyed",
        None,
        "True if the newest step is good (exit code 0).",
        "The missing parts of the newest step, with the exit code of the process. Only if `ok` is false.",
    )
}
