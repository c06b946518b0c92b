"""Tensors that are no weights by themselves, such as codes and scales. Features recognize them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptconv.tensors.lazy import LazyTensor

# The modules of features whose `parts_among(tensors)` returns {name: the weight that it is a part of}.
CODED: dict[str, str] = {
    "quantized": "ckptconv.features.quantized.parts",
}


def parts_among(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Return {name: the weight that it is a part of} for the parts of weights among `tensors`, by names and dtypes."""
    return {
        part: name for module in CODED.values() for part, name in import_module(module).parts_among(tensors).items()
    }
