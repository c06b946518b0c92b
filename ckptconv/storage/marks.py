"""Marks on the files that this program wrote: each says which kind of file it is.

A file of safetensors does not say which program wrote it, and one of another program may have the very same header. So
a file gets an attribute of the file system, with its size and the time of its last change: a file that was changed
since, or is a copy, has no mark. Some file systems have no attributes, and stores have none.
"""

from __future__ import annotations

import contextlib
import os

_NAME = "user.ckptconv"
# The label of a marked file that was changed since.
CHANGED = "changed"


def mark(fd: int, label: str) -> None:
    """Mark an open file, which is complete, with `label`, if its file system can."""
    status = os.fstat(fd)
    with contextlib.suppress(OSError, AttributeError):  # only Linux has the call
        os.setxattr(fd, _NAME, f"{label} {status.st_size} {status.st_mtime_ns}".encode())


def marked(path: str) -> str:
    """Return the label of the local file at `path`: "" if it has no mark, CHANGED if it was changed since."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        label, size, time = os.getxattr(path, _NAME).decode().split()
        status = os.stat(path)
        return label if (int(size), int(time)) == (status.st_size, status.st_mtime_ns) else CHANGED
    return ""
