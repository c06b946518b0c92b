"""The report of `steps`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class StepSummary:
    """A step of a run."""

    name: str
    """The name of its directory in the run; of a step of files, that of the file with the weights."""

    path: str
    """The path or URL of the step."""

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
    """Whether the bytes of every tensor are there, by the step's geometry; null if its format is not supported."""

    why: str
    """The reason why the step is not whole, or was not read; empty if it is whole."""

    marked: bool | None
    """Whether the step's markers say that it is complete; null if it has none."""

    marks: str
    """The markers that say so, or the reason to believe that it is not complete."""

    files: int
    """Number of files of the step."""

    bytes: int
    """The sizes of its files, together."""

    weights_bytes: int
    """Bytes of weights."""

    optimizer_bytes: int
    """Bytes of the optimizer's states."""

    rest_bytes: int
    """Bytes of all other contents of the step's files."""

    like: str
    """The step whose files have the same names and sizes, and that was opened in its place; empty if it was opened
    itself."""

    checked: int | None = None
    """Number of digests and checksums compared, with --check; null if none were asked for."""

    damage: str = ""
    """The error of a digest or checksum that does not match, with --check; empty if there is none."""

    nan: int | None = None
    """Number of NaN values, with --stats; null if that was not asked for."""

    inf: int | None = None
    """Number of infinite values, with --stats."""

    norm: float | None = None
    """The norm of all finite weights together, with --stats."""


@dataclass
class RunSummary:
    """The steps in the directory of a run, as `steps` reports them."""

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
    """Entries with the number of a step that do not count as steps: {name: reason}."""

    warnings: Sequence[str] = ()
    """Warnings, one sentence each."""

    seconds: float = 0.0
    """Duration in seconds."""


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
