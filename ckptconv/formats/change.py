"""What an output changes of what a configuration beside it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """What an output changes of what a configuration says: the `dtype` that weights were cast to, "" for none; with
    `plain`, they are not quantized any more, and with `quantization`, they are quantized as that says. `settings` are
    other values of it."""

    dtype: str = ""
    plain: bool = False
    quantization: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = {}


UNCHANGED = Change()
