"""Marks on the files that this program made, which say what each is.

A file of safetensors does not say which program wrote it, and one of another program may have the very same header. So
a file gets an attribute of the file system, beside its bytes, with its size and the time of its last change: what was
changed since, or is a copy, has no mark. Some file systems have no attributes, and stores have none.
"""

from __future__ import annotations

import contextlib
import os

_NAME = "user.ckptconv"
# What the mark of a file says that somebody changed since.
CHANGED = "changed"


def mark(fd: int, what: str) -> None:
    """Mark an open file, which is complete, as `what`, if its file system can."""
    found = os.fstat(fd)
    with contextlib.suppress(OSError, AttributeError):  # only Linux has the call
        os.setxattr(fd, _NAME, f"{what} {found.st_size} {found.st_mtime_ns}".encode())


def marked(path: str) -> str:
    """Return what the local file at `path` is marked as: "" if it has no mark, CHANGED if it was changed after it got
    it."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        what, size, time = os.getxattr(path, _NAME).decode().split()
        status = os.stat(path)
        return what if (int(size), int(time)) == (status.st_size, status.st_mtime_ns) else CHANGED
    return ""
