"""View tensors of dtypes that safetensors lacks as dtypes it has, with the same bits. Pure: nothing is copied."""

from __future__ import annotations

import sys
from typing import Any

from ckptconv.structure import leaves
from ckptconv.structure.record import expect
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored, View
from ckptconv.tensors.strides import contiguous_strides

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
_PAIRS = frozenset({"complex128", "complex32"})


def stored(tensor: Any) -> Any:
    """Return `tensor`, lazy or torch, in a dtype that safetensors has: itself, or the same bits as another dtype."""
    name = leaves.dtype_name(tensor)
    if name not in STORED_AS:
        return tensor
    if not isinstance(tensor, LazyTensor):
        torch = sys.modules["torch"]
        return torch.view_as_real(tensor) if name in _PAIRS else tensor.view(getattr(torch, STORED_AS[name]))
    shape = (*tensor.shape, 2) if name in _PAIRS else tensor.shape
    return View(tensor, DTYPES[STORED_AS[name]], shape)


def original(tensor: LazyTensor) -> LazyTensor:
    """Return the tensor of a dtype that safetensors lacks if `tensor` is its stored form; else `tensor`."""
    return tensor.tensor if isinstance(tensor, View) and tensor.tensor.dtype.name in STORED_AS else tensor


def viewed_as(tensor: Any, dtype: Any) -> Any:
    """Return the tensor of `dtype` (a name) that is stored as `tensor`: the inverse of `stored`.

    A torch tensor is returned unchanged if `dtype` is quantized: torch makes those from integers. Raise CorruptError if
    the tensor cannot have that dtype.
    """
    expect(type(dtype) is str and dtype in STORED_AS, f"{str(dtype)[:100]!r} is not a dtype that is stored as another")
    name, shape = leaves.dtype_name(tensor), tuple(tensor.shape)
    fits = name == STORED_AS[dtype] and (dtype not in _PAIRS or shape[-1:] == (2,))
    expect(fits, f"a tensor of {dtype} cannot be stored as {name} {shape}")
    if dtype in _PAIRS:
        shape = shape[:-1]
    if isinstance(tensor, LazyTensor):
        return _lazy(tensor, dtype, shape)
    if leaves.is_tensor(tensor):
        return _live(tensor, dtype)
    return tensor.view("complex128").reshape(shape) if dtype == "complex128" else tensor


def _lazy(tensor: LazyTensor, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
    target = DTYPES[dtype]
    if isinstance(tensor, View) and (tensor.tensor.dtype, tensor.tensor.shape) == (target, shape):
        return tensor.tensor
    if isinstance(tensor, Stored) and tensor.contiguous:
        return Stored(tensor.file, tensor.offset, target, shape, contiguous_strides(shape))
    return View(tensor, target, shape)


def _live(tensor: Any, dtype: str) -> Any:
    torch = sys.modules["torch"]
    if dtype not in _PAIRS:
        return tensor.view(getattr(torch, dtype)) if dtype.startswith("bits") else tensor
    if tensor.data_ptr() % (2 * tensor.element_size()):
        # Pairs in a safetensors file may be misaligned: torch's instructions for copying complex numbers crash on
        # these.
        tensor = tensor.clone()
    try:
        return torch.view_as_complex(tensor)
    except RuntimeError:  # the two parts are not adjacent
        return torch.view_as_complex(tensor.contiguous())
