"""The objects that `convert --output-dir` prints with --json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ckptconv.cli.printed import Failure

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class Converted(TypedDict):
    """The report of an input that was converted."""

    ok: Literal[True]
    """It was converted."""


class NotConverted(TypedDict):
    """An input that was not converted."""

    ok: Literal[False]
    """It was not converted."""

    input: str
    """Path or URL of the input."""

    error: Failure
    """The error."""


class SeveralInputs(TypedDict):
    """The output of `convert --output-dir --json`, also when some or all of its inputs fail."""

    error: NotRequired[Failure]
    """One error that summarizes all failures, with the exit code of the process. Only when `ok` is false."""

    results: list[Converted | NotConverted]
    """The result of each input, in the order of the command line."""

    inputs: int
    """Number of inputs."""

    converted: int
    """Number of inputs that were converted."""

    failed: int
    """Number of inputs that failed. Inputs that were not reached before a signal are in neither number."""

    tensors: int
    """Tensors written."""

    input_bytes: int
    """Size of all files that were read."""

    bytes_read: int
    """Bytes read; with --dry-run, those of the planning."""

    bytes_written: int
    """Bytes written; with --dry-run, those that would be."""

    seconds: float
    """Duration in seconds; with --dry-run, of the planning."""

    peak_rss_bytes: int
    """The most memory that one process held."""


# Their schemas (scripts/schemas.py).
COMMANDS: dict[str, tuple[Any, ...]] = {
    "convert-several": (
        "Several inputs",
        "",
        ("convert",),
        SeveralInputs,
        "",
        None,
        "True if every input was converted (exit code 0).",
    ),
}
# Objects that also have the fields of another schema.
EXTENDED = {Converted: "urn:ckptconv:1:conversion#/$defs/report"}
