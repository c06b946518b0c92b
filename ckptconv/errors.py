"""The closed set of errors that a user can meet, each with the exit code of the command line.

    CkptconvError               1    all of them
    ├── FailedError             1    the command failed: a full disk, a broken connection
    ├── DifferenceError         1    an output differs from its source, or a source does not match its reference
    ├── UsageError              2    the arguments are invalid, or name something that does not exist
    │   ├── MissingError        2    there is nothing at a path; a FileNotFoundError too
    │   ├── NoTensorError       2    a checkpoint has no tensor of that name; a KeyError too
    │   └── OutOfRangeError     2    a tensor has no such index; an IndexError too
    ├── UnsafeError             3    the input is malicious, or refers to files outside its directory
    ├── CorruptError            4    the input is inconsistent, truncated or incomplete
    │   ├── LimitError          4    it demands more resources than a valid file of its size needs
    │   └── TruncatedError      4    the data ends before what it describes does
    ├── UnsupportedError        5    the input has a known layout that ckptconv does not convert
    └── StoppedError     130, 143    a signal stopped the command

Every error is one short paragraph: what is wrong, in which file, what was expected and what was found; `hint` says what
to do next. A call raises nothing else: any exception that is not listed here is a bug. After one, nothing new has a
final name; of a call that writes, the message says so.

Examples:
    >>> try:
    ...     ckptconv.convert("no-such-file.pt", "model.safetensors")
    ... except ckptconv.CkptconvError as error:
    ...     print(error.exit_code, error.message)
    2 no-such-file.pt does not exist. Nothing was written.
"""

from __future__ import annotations

import contextlib
import errno

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, ClassVar

# The sentences of a call that writes if it fails before it begins an output, and before it publishes one.
UNWRITTEN, UNPUBLISHED = "Nothing was written.", "No output was published."
# Advice about a file whose bytes have changed since it was written.
AGAIN = "Copy or download it again."


class CkptconvError(Exception):
    """Base of all errors: `message` is the paragraph, `hint` the advice, `exit_code` the exit code of the process."""

    exit_code: int = 1
    kind: ClassVar[str] = "failed"
    # Whether the message says what was left untouched, or must not.
    _noted = False

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by `__init__`, which takes other arguments in some classes.
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[CkptconvError], arguments: tuple[Any, ...]) -> CkptconvError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    return error


@contextlib.contextmanager
def leaving(untouched: str) -> Iterator[None]:
    """Add the sentence `untouched` to the message of an error of the block, or of the function that this decorates; ""
    if nothing is known. The innermost block decides. The error of a signal has the sentence already."""
    try:
        yield
    except StoppedError:
        raise
    except CkptconvError as error:
        if untouched and not error._noted and not any(part in error.message for part in ("Nothing was ", "published.")):
            error.message += f" {untouched}"
        error._noted = True
        raise


class FailedError(CkptconvError):
    """The command failed: for example, the disk is full, a file is unreadable, or a connection broke."""


class DifferenceError(CkptconvError):
    """An output differs from its source, or a source does not match its reference.

    `difference` describes it: "what" ("value", "dtype", "missing", "file", …) and, as far as they apply, "tensor",
    "file", "index" (one number for each dimension), "expected", "found" and "elements" (how many differ): those of the
    first. "differences" are those of every tensor that differs, if tensors do. With "what" "reference", "counts" has
    the number of tensors by how they differ, and "tensors" a row for each.
    """

    kind = "difference"

    def __init__(self, message: str, hint: str = "", **difference: Any) -> None:
        super().__init__(message, hint)
        self.difference = difference


class UsageError(CkptconvError):
    """The arguments are invalid, or name something that does not exist."""

    exit_code = 2
    kind = "usage"


class MissingError(UsageError, FileNotFoundError):
    """There is nothing at a path. It is a FileNotFoundError too."""

    errno = errno.ENOENT


class NoTensorError(UsageError, KeyError):
    """A checkpoint has no tensor of that name. It is a KeyError too."""


class OutOfRangeError(UsageError, IndexError):
    """A tensor has no such index. It is an IndexError too."""


class UnsafeError(CkptconvError):
    """The input is malicious, or refers to files outside its directory."""

    exit_code = 3
    kind = "unsafe"


class CorruptError(CkptconvError):
    """The input is inconsistent, truncated or incomplete."""

    exit_code = 4
    kind = "corrupt"


class TruncatedError(CorruptError):
    """The data ends before what it describes does."""


def damaged(message: str) -> CorruptError:
    """Return the error for a file whose bytes have changed since it was written."""
    return CorruptError(message, AGAIN)


class LimitError(CorruptError):
    """The input demands more resources than a valid file of its size needs."""

    kind = "limit"


class UnsupportedError(CkptconvError):
    """The input has a known layout that ckptconv does not convert."""

    exit_code = 5
    kind = "unsupported"


class StoppedError(CkptconvError):
    """A signal stopped the command: SIGINT (exit code 130) or SIGTERM (143)."""

    kind = "interrupted"

    def __init__(self, message: str, hint: str = "", *, exit_code: int = 130) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


ERROR_KINDS: tuple[type[CkptconvError], ...] = (
    FailedError,
    DifferenceError,
    UsageError,
    UnsafeError,
    CorruptError,
    LimitError,
    UnsupportedError,
    StoppedError,
)
