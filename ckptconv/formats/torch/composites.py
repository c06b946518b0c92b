"""Builds `Composite`s for tensors that consist of several, or have no data: quantized, sparse, nested, of a wrapper
subclass, on the meta device. The names and argument lists come from `torch/_utils.py` and `torch/_tensor.py`."""

from __future__ import annotations

from typing import Any

from ckptconv.formats.torch.objects import Tensors, check_arguments, unknown
from ckptconv.formats.torch.storages import Storage
from ckptconv.pickles.nodes import COMPOSITES, QUANTIZERS, SPARSE, Composite, Global, Opaque, Size, TorchConstant
from ckptconv.pickles.vocabulary import MalformedError
from ckptconv.structure.soundness import PACKED, composite_fault
from ckptconv.tensors.lazy import Tagged


def _composite(kind: str, parts: dict[str, Any]) -> Any:
    """Return a tensor of these `parts`; NotImplemented if one is Opaque. Raises MalformedError if they do not fit."""
    for part in parts.values():
        if type(part) is Opaque:
            return NotImplemented
    fault = composite_fault(kind, parts)
    if fault:
        raise MalformedError(f"has a {kind} tensor with {fault}")
    return Composite(kind, parts)


def meta(dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool) -> Any:
    return _composite(
        "meta", {"dtype": dtype, "shape": Size(shape), "strides": strides, "requires_grad": requires_grad}
    )


def quantized(tensors: Tensors, args: tuple[Any, ...]) -> Any:
    """Take seven arguments, one of them the quantizer; or eight: torch 1.1 and 1.2 split it into two."""
    check_arguments(args, "_rebuild_qtensor", 7, 8)
    if len(args) == 8:
        args = (*args[:4], (TorchConstant("qscheme", "per_tensor_affine"), *args[4:6]), *args[6:])
    storage, offset, size, stride, quantizer, requires_grad, _hooks = args
    if type(storage) is not Storage:
        return unknown("a quantized tensor", storage)
    packed: dict[str, Any] = {}
    if storage.dtype.name in PACKED:
        # Several values share a byte: take the bytes as they are.
        shape, strides, _, extent = tensors.geometry(size, stride)
        if offset != 0 or extent > storage.size * PACKED[storage.dtype.name]:
            raise MalformedError("has a quantized tensor that extends beyond its storage")
        packed = {"shape": Size(shape), "strides": strides}
        size, stride = (storage.size,), (1,)
    if type(quantizer) is not tuple or not 3 <= len(quantizer) <= 4:
        raise MalformedError("has a quantized tensor whose quantizer is not a tuple of parameters")
    values = tensors.view(storage, offset, size, stride)
    if type(values) is not Tagged:
        return values  # on the meta device, without data
    if type(requires_grad) is not bool or requires_grad:
        raise MalformedError("has a quantized tensor that requires gradients")
    names = ("qscheme", *QUANTIZERS[len(quantizer) - 3])
    return _composite("quantized", {"values": values, **dict(zip(names, quantizer, strict=True)), **packed})


def on_meta(tensors: Tensors, args: tuple[Any, ...]) -> Any:
    check_arguments(args, "_rebuild_meta_tensor_no_storage", 4)
    shape, strides, *_ = tensors.geometry(args[1], args[2])
    return meta(args[0], shape, strides, args[3])


def wrapper_subclass(tensors: Tensors, args: tuple[Any, ...]) -> Any:
    check_arguments(args, "_rebuild_wrapper_subclass", 8)
    cls, dtype, size, stride, offset, layout, device, requires_grad = args
    if type(cls) is not Global:
        return unknown("a tensor of a class", cls)
    tensors.geometry(size, stride)
    if type(offset) is not int or type(requires_grad) is not bool:
        raise MalformedError(f"has a tensor of {str(cls)[:100]} whose arguments have the wrong types")
    for constant, kind in ((dtype, "dtype"), (layout, "layout")):
        if type(constant) is not TorchConstant or constant.kind != kind:
            raise MalformedError(f"has a tensor of {str(cls)[:100]} whose {kind} is invalid")
    return Composite(
        str(cls),
        {
            "dtype": dtype,
            "shape": size,
            "strides": stride,
            "storage_offset": offset,
            "layout": layout,
            "device": device,
            "requires_grad": requires_grad,
        },
    )


def sparse(args: tuple[Any, ...]) -> Any:
    """Take (layout, (indices, values, size[, coalesced])) or (layout, (compressed indices, indices, values, size))."""
    check_arguments(args, "_rebuild_sparse_tensor", 2)
    layout, data = args
    known = type(layout) is TorchConstant and layout.kind == "layout" and layout.name in SPARSE
    if not known or type(data) is not tuple:
        raise MalformedError("has a sparse tensor without a layout or without parts")
    names = COMPOSITES[layout.name]
    if layout.name == "sparse_coo" and len(data) > len(names):
        names = (*names, "is_coalesced")
    if len(data) != len(names):
        raise MalformedError(f"has a {layout.name} tensor of {len(data)} parts instead of {len(names)}")
    return _composite(layout.name, dict(zip(names, data, strict=True)))


def nested(args: tuple[Any, ...]) -> Any:
    check_arguments(args, "_rebuild_nested_tensor", 4)
    return _composite("nested", dict(zip(COMPOSITES["nested"], args, strict=True)))
