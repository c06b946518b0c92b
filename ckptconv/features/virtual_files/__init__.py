"""The files of a conversion without writing them: a mapping, and a file system of fsspec.

In: a path, and the options of a conversion; or a file that describes others. Out: bytes at any range of each file,
which are those that the conversion writes.
"""

from __future__ import annotations

NEEDS = ("companions",)
