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
    """The output of any failing command with --json, also after wrong usage and interruptions."""

    input: str | None
    """The first argument of the command; null as far as it is not known."""

    error: Failure
    """The error."""
