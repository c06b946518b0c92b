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
    """Index of the first difference: one number for each dimension of the tensor, or the place in the record."""

    expected: NotRequired[Any]
    """The source's value, or another property that `what` names."""

    found: NotRequired[Any]
    """The output's value, or another property that `what` names."""

    elements: NotRequired[int]
    """Number of elements of the tensor that differ."""


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
    """The error, with the file, and with the values that were expected and found."""

    hint: str
    """The next step for the user; may be empty."""

    difference: NotRequired[FoundDifference]
    """The difference that verify or diff found. With --like and `what` "reference": the tensors that only the input or
    only its reference has. Of another command, such as `rows check`: its whole report."""


class Failed(TypedDict):
    """The output of any failing command with --json, also after wrong usage and interruptions."""

    input: str | None
    """The first argument of the command; null as far as it is not known."""

    error: Failure
    """The error."""
