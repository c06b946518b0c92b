"""Tensors of dtypes that safetensors lacks, of the tensors that are stored in their place. Pure: nothing is copied."""

from __future__ import annotations

from typing import Any

from ckptconv.structure import leaves
from ckptconv.structure.dtype_views import PAIRS, STORED_AS
from ckptconv.structure.reading import expect
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored, View
from ckptconv.tensors.strides import contiguous_strides


def viewed_as(tensor: Any, dtype: Any) -> Any:
    """Return the tensor of `dtype` (a name) that is stored as `tensor`, the inverse of `stored`. Raise CorruptError if
    the tensor cannot have that dtype."""
    expect(type(dtype) is str and dtype in STORED_AS, f"{str(dtype)[:100]!r} is not a dtype that is stored as another")
    name, shape = leaves.dtype_name(tensor), tuple(tensor.shape)
    fits = name == STORED_AS[dtype] and (dtype not in PAIRS or shape[-1:] == (2,))
    expect(fits, f"a tensor of {dtype} cannot be stored as {name} {shape}")
    if dtype in PAIRS:
        shape = shape[:-1]
    if not isinstance(tensor, LazyTensor):
        return leaves.live("tensors", tensor).viewed_as(tensor, dtype, shape)
    target = DTYPES[dtype]
    if isinstance(tensor, View) and (tensor.tensor.dtype, tensor.tensor.shape) == (target, shape):
        return tensor.tensor
    if isinstance(tensor, Stored) and tensor.contiguous:
        return Stored(tensor.file, tensor.offset, target, shape, contiguous_strides(shape))
    return View(tensor, target, shape)
