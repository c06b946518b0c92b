"""The changes that an output makes to the configuration beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """The changes that an output makes to a configuration. `dtype` is that to which weights were cast, "" for none.
    With `plain`, the weights are no longer quantized; with `quantization`, they are quantized as that describes.
    `edit` returns the configuration that is true of the tensors, where they are others than those of the input."""

    dtype: str = ""
    plain: bool = False
    quantization: Mapping[str, Any] | None = None
    edit: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


UNCHANGED = Change()
