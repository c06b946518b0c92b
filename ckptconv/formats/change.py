"""The changes that an output makes to the configuration beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """The changes that an output makes to a configuration. `dtype` is that to which weights were cast, "" for none.
    With `plain`, the weights are no longer quantized; with `quantization`, they are quantized as that describes.
    `settings` are other changed values."""

    dtype: str = ""
    plain: bool = False
    quantization: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = {}


UNCHANGED = Change()
