"""What tests of the trunk ask of structure records too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ckptconv

from . import attacks

# What a call does with a value in the place of another one, and what it says.
OTHER_VALUES: dict[str, tuple[Callable[[Any], object], Any, str]] = {
    "flat": (
        lambda value: ckptconv.unflatten(value, None),
        "text",
        "expects a mapping and a string, not 'text' and None",
    ),
    "structure": (lambda value: ckptconv.unflatten({}, value), 5, "expects a mapping and a string, not dict and 5"),
}
ATTACKS = [*attacks.FILES.values(), *attacks.SETS]
