"""View tensors of dtypes that safetensors lacks as dtypes it has, with the same bits. Pure: nothing is copied."""

from __future__ import annotations

from typing import Any

from ckptconv.structure import leaves
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, View

# The dtype that each is stored as: a complex number as a pair of its parts (one more dimension), any other element as
# an integer of the same size.
STORED_AS = {
    "complex128": "float64",
    "complex32": "float16",
    "qint8": "int8",
    "quint8": "uint8",
    "qint32": "int32",
    "quint4x2": "uint8",
    "quint2x4": "uint8",
    "bits8": "uint8",
    "bits16": "uint16",
    "bits1x8": "uint8",
    "bits2x4": "uint8",
    "bits4x2": "uint8",
}
PAIRS = frozenset({"complex128", "complex32"})


def stored(tensor: Any) -> Any:
    """Return `tensor`, lazy or torch, in a dtype that safetensors has: itself, or the same bits as another dtype."""
    name = leaves.dtype_name(tensor)
    if name not in STORED_AS:
        return tensor
    if not isinstance(tensor, LazyTensor):
        return leaves.live("tensors", tensor).stored(tensor, STORED_AS[name])
    shape = (*tensor.shape, 2) if name in PAIRS else tensor.shape
    return View(tensor, DTYPES[STORED_AS[name]], shape)


def original(tensor: LazyTensor) -> LazyTensor:
    """Return the tensor of a dtype that safetensors lacks if `tensor` is its stored form; else `tensor`."""
    return tensor.tensor if isinstance(tensor, View) and tensor.tensor.dtype.name in STORED_AS else tensor
