"""Extracts the tensors of a state dict. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.tensors.lazy import LazyTensor, untagged


def tensors_in(state: Mapping[Any, Any]) -> dict[str, LazyTensor]:
    """Return the tensors of a state dict, without the tags of frameworks."""
    return {
        name: untagged(value)
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, LazyTensor)
    }
