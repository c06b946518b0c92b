"""Loaded by dask workers in tests: a file is made when the test says so, and meanwhile leaves word of who makes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ckptconv.publish.staging import local


def _slowed(create: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(self: Any, name: str, size: int) -> Any:
        writer = create(self, name, size)
        word = os.path.join(self.staging, f".begun-{os.getpid()}")
        with open(word, "w"):
            while not os.path.exists(os.environ["GO_ON"]):
                time.sleep(0.01)
        os.unlink(word)
        return writer

    return slowly


local.LocalStaging.create = _slowed(local.LocalStaging.create)  # type: ignore[method-assign]
