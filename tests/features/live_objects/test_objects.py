"""Objects that cannot be nodes of a tree."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from effort import every

from ckptconv.errors import UsageError
from ckptconv.structure.keymap import flatten


@every("value", [threading.Lock(), (n for n in ()), sys.modules["math"]])
def test_what_cannot_be_recorded_is_refused_and_named(value: Any) -> None:
    with pytest.raises(UsageError, match=type(value).__name__):
        flatten({"a": value})
