"""Objects that only the command line prints with --json: no call of the library returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class OneDifference(TypedDict):
    """A tensor that differs."""

    what: str
    """value, dtype, shape, missing, unexpected, alias, structure, file, header, index or manifest; tensors, of diff."""

    tensor: str | None
    """The tensor."""

    file: NotRequired[str | None]
    """The file."""

    index: NotRequired[Any]
    """Where the first difference is: one number for each dimension of the tensor, or the place in the structure
    record."""

    expected: NotRequired[Any]
    """What the source has."""

    found: NotRequired[Any]
    """What the output has."""

    elements: NotRequired[int]
    """How many elements of the tensor differ."""


class FoundDifference(OneDifference):
    """A difference that verify or diff reports."""

    differences: NotRequired[list[OneDifference]]
    """Every tensor that differs, and how: the fields above are those of the first."""


class Failure(TypedDict):
    """An error."""

    exit_code: Literal[1, 2, 3, 4, 5, 130, 143]
    """The exit code of the process."""

    kind: Literal["failed", "difference", "usage", "unsafe", "corrupt", "limit", "unsupported", "interrupted"]
    """The class of the error."""

    message: str
    """What is wrong, in which file, what was expected and found."""

    hint: str
    """What to do; may be empty."""

    difference: NotRequired[FoundDifference]
    """What verify or diff found to differ; of --like, which tensors an input and its reference do not have in common,
    with `what` "reference"; or the whole report of another command, such as `rows check`."""


class Failed(TypedDict):
    """The output of any failing command with --json, after wrong usage and interruptions too."""

    input: str | None
    """The first argument of the command; null as far as it is not known."""

    error: Failure
    """The error."""


class Converted(TypedDict):
    """The report of an input that was converted."""

    ok: Literal[True]
    """It was converted."""


class NotConverted(TypedDict):
    """An input that was not converted."""

    ok: Literal[False]
    """It was not converted."""

    input: str
    """What was to be converted."""

    error: Failure
    """Why not."""


class SeveralInputs(TypedDict):
    """The output of `convert --output-dir --json`, also when some or all of its inputs fail."""

    error: NotRequired[Failure]
    """What stands for all failures, with the exit code of the process. Only when `ok` is false."""

    results: list[Converted | NotConverted]
    """What became of each input, in the order of the command line."""

    inputs: int
    """How many inputs there were."""

    converted: int
    """How many were converted."""

    failed: int
    """How many failed. What a signal kept from being done is in neither number."""

    tensors: int
    """Tensors written."""

    input_bytes: int
    """The sizes of all files that were read, together."""

    bytes_read: int
    """Bytes read."""

    bytes_written: int
    """Bytes written."""

    seconds: float
    """How long it took."""

    peak_rss_bytes: int
    """The most memory that one process held."""
