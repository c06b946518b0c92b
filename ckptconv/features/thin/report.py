"""What `thin` says of a run."""

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
    """What is done with it: keep, remove, or lessen, which is to reduce it to its weights and small files."""

    why: Sequence[str]
    """Why it stays; empty if it does not."""

    done: bool = False
    """Whether that was done. What stays is not done."""

    left_bytes: int | None = None
    """The sizes of the files that are left of it, or would be, together; null for a delta that is not written yet."""

    lost: Sequence[str] = ()
    """Files in a reduced step that go with the optimizer, and hold neither its states nor weights."""


@dataclass
class ThinReport:
    """What `thin` does with a run, or would do."""

    input: str
    """The run."""

    path: str
    """The directory in which its steps are."""

    steps: Sequence[ThinnedStep]
    """The steps, the oldest first."""

    carried_out: bool
    """Whether it was done, as with --yes."""

    kept_bytes: int
    """Bytes of the steps that stay."""

    removed_bytes: int
    """Bytes of the steps that go or are reduced, as they are before."""

    beside: Mapping[str, str] = field(default_factory=dict)
    """What has the number of a step, does not count as one, and stays: {name: why}."""

    finished: Sequence[str] = ()
    """Steps that an earlier run had begun, and that were finished now."""

    warnings: Sequence[str] = ()
    """What is cause for concern, each in a sentence."""

    seconds: float = 0.0
    """How long it took."""


# Title, what prints it, the commands, the class of the fields; then: the fields stand beside `ok`.
COMMANDS = {"thin": ("thin", "The output of `thin --json`.", ("thin",), ThinReport, "")}
# What the type of a field does not say.
MORE = {(ThinnedStep, "action"): {"enum": ["keep", "remove", "lessen"]}}
