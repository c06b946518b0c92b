"""What tests of others ask of files that are not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ckptconv

# What offers the files of a conversion without writing them.
OFFERING = ckptconv.VirtualFiles
# What a call does with a value in the place of a path.
PATHS: dict[str, Callable[[Any], object]] = {"VirtualFiles": ckptconv.VirtualFiles}
# Calls that open a checkpoint.
OPENING: list[Callable[[Any], object]] = [ckptconv.VirtualFiles]
