"""Packed files, such as compressed members of archives: a feature unpacks them."""

from __future__ import annotations

from typing import Any

from ckptconv.errors import LimitError, UnsupportedError
from ckptconv.process import needed

# A byte of deflate stands for at most 1,032 bytes: two bits for 258.
MAX_RATIO = 1032
# The feature that unpacks packed files. In `unpacking` in its folder, `UNPACKING` has the methods, each with a function
# that yields the content of a file, given the `File`, its `Packed` and a reader of packed bytes; `Contents` opens
# readers of contents.
UNPACKING = "compressed"


def unpacking(name: str) -> Any:
    """Return the module that unpacks packed files. Raise UnsupportedError for the file `name` if there is none."""
    subject = f"{name} is compressed: to unpack it"
    return needed(UNPACKING, "unpacking", subject, "Write the file uncompressed.", UnsupportedError)


def check_ratio(name: str, packed: int, size: int) -> None:
    """Raise LimitError if `packed` bytes of deflate cannot inflate to `size` bytes."""
    if size > MAX_RATIO * packed:
        raise LimitError(
            f"{name} should inflate from {packed} to {size} bytes, but deflate cannot produce more than "
            f"{MAX_RATIO * packed}."
        )
