"""Loaded by dask workers in tests: files take their time, and leave word of who makes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ckptconv import staging


def _slowed(create: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(self: Any, name: str, size: int) -> Any:
        writer = create(self, name, size)
        word = os.path.join(self.staging, f".begun-{os.getpid()}")
        with open(word, "w"):
            time.sleep(0.5)
        os.unlink(word)
        return writer

    return slowly


staging.StagedDirectory.create = _slowed(staging.StagedDirectory.create)  # type: ignore[method-assign]
