"""Packed files, such as compressed members of archives: a feature unpacks them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckptconv.errors import LimitError, UnsupportedError

# A byte of deflate stands for at most 1,032 bytes: two bits for 258.
MAX_RATIO = 1032
# What unpacks packed files: the module. There, `UNPACKING` has the methods, each with a function that yields the
# content of a file, given the `File`, its `Packed` and a reader of packed bytes; `Contents` opens readers of contents.
UNPACKING: tuple[str, ...] = (
    "ckptconv.features.compressed.unpacking",
)  # fmt: skip


def unpacking(name: str) -> Any:
    """Return the module that unpacks packed files. Raise UnsupportedError for the file `name` if there is none."""
    if not UNPACKING:
        raise UnsupportedError(
            f"{name} is compressed, and the feature compressed is not installed.", "Write the file uncompressed."
        )
    return import_module(UNPACKING[0])


def check_ratio(name: str, packed: int, size: int) -> None:
    """Raise LimitError if `packed` bytes of deflate cannot inflate to `size` bytes."""
    if size > MAX_RATIO * packed:
        raise LimitError(
            f"{name} should inflate from {packed} to {size} bytes, but deflate cannot produce more than "
            f"{MAX_RATIO * packed}."
        )
