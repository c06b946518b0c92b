"""Check whether the facts about a tensor, apart from its bytes, can be true: for pickles and structure records. Pure.

A composite tensor is checked by shapes and dtypes. No data is read, so an index inside a sparse tensor may still be out
of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeAlias

from ckptconv.pickles.nodes import COMPOSITES, QUANTIZERS, SPARSE, WRAPPER, Composite, TorchConstant
from ckptconv.structure import leaves
from ckptconv.structure.attributes import attributes_fault
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS

_QUANTIZED = frozenset({"quint8", "qint8", "qint32", "quint4x2", "quint2x4"})
# The dtypes in which torch returns their raw values.
_QUANTIZED_BITS = frozenset({"uint8", "int8", "int32"})
# Quantized dtypes of less than a byte, with the number of values in one.
PACKED = {"quint4x2": 2, "quint2x4": 4}
_PER_TENSOR = frozenset({"per_tensor_affine", "per_tensor_symmetric"})
_Check: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], Callable[[Mapping[str, Any]], None]]
# Facts that any composite may have apart from its parts.
_COMMON = frozenset({"requires_grad", "attributes", "class"})


class _FaultError(Exception):
    """The reason why a composite is not sound."""


def _need(condition: object, reason: str) -> None:
    if not condition:
        raise _FaultError(reason)


def composite_fault(kind: str, parts: Mapping[str, Any]) -> str:
    """Return why `parts` do not make up a tensor of `kind`; "" if they do, or if the kind is unknown.

    `parts` may hold lazy or torch tensors, and nodes or live objects for constants.
    """
    known = _CHECKS.get(kind, _WRAPPER if _WRAPPER[0][3] in parts else None)
    if known is None:
        return ""
    needed, optional, check = known
    missing = [name for name in needed if name not in parts]
    if missing:
        return f"no {missing[0]}"
    unknown = [name for name in parts if name not in needed and name not in optional and name not in _COMMON]
    if unknown:
        return f"a part {str(unknown[0])[:40]!r}, which this kind of tensor does not have"
    if type(parts.get("requires_grad", False)) is not bool:
        return "requires_grad that is neither true nor false"
    # A wrapper's kind is its class, whose state may have any form.
    cls = parts.get("class", "tensor" if kind in _CHECKS else kind)
    if type(cls) is not str:
        return "a class that is not text"
    fault = attributes_fault(cls, parts.get("attributes"))
    if fault:
        return fault
    try:
        check(parts)
    except _FaultError as reason:
        return str(reason)
    return ""


def _shape(part: Any, name: str) -> tuple[int, ...]:
    """Return the shape of a part that must be a tensor."""
    if type(part) is Composite and part.kind == "meta":
        return _counts(part.parts.get("shape"), name)
    _need(isinstance(part, LazyTensor) or leaves.is_tensor(part), f"{name} that are not a tensor")
    return tuple(part.shape)


def _dtype(part: Any) -> str:
    if type(part) is Composite:
        return _constant(part.parts.get("dtype"), "dtype")
    return leaves.dtype_name(part)


def _integers(part: Any, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor of integers."""
    shape = _shape(part, name)
    dtype = _dtype(part)
    _need(dtype in DTYPES and DTYPES[dtype].kind in "iu", f"{name} of {dtype}, which are not integers")
    return shape


def _counts(part: Any, name: str) -> tuple[int, ...]:
    sound = isinstance(part, tuple) and len(part) <= MAX_DIMS
    _need(sound and all(type(size) is int and 0 <= size < MAX_BYTES for size in part), f"{name} that is not a size")
    return tuple(part)


def _constant(part: Any, kind: str) -> str:
    """Return the name of a constant of torch."""
    if type(part) is TorchConstant:
        cls, name = part
    else:
        cls, name = type(part).__name__, str(part).removeprefix("torch.")
    _need(cls == kind, f"an invalid {kind}")
    return str(name)


def _elements(shape: tuple[int, ...]) -> int:
    numel = math.prod(shape)
    _need(numel < MAX_BYTES, "too many elements")
    return numel


def _check_coo(parts: Mapping[str, Any]) -> None:
    indices, values = _integers(parts["indices"], "indices"), _shape(parts["values"], "values")
    shape = _counts(parts["shape"], "a shape")
    _need(len(indices) == 2 and len(values) >= 1, "indices or values of a wrong number of dimensions")
    sparse, count = indices
    _need(values[0] == count, f"{count} indices and {values[0]} values")
    _need(len(shape) == sparse + len(values) - 1 and shape[sparse:] == values[1:], "values that do not fit its shape")
    _need(not count or all(shape[:sparse]), "values in a shape without elements")
    _need(parts.get("is_coalesced") in (None, True, False), "is_coalesced that is neither true nor false")


def _check_compressed(rows: bool, blocks: bool, names: tuple[str, str]) -> Callable[[Mapping[str, Any]], None]:
    def check(parts: Mapping[str, Any]) -> None:
        compressed, plain = (_integers(parts[name], name) for name in names)
        values, shape = _shape(parts["values"], "values"), _counts(parts["shape"], "a shape")
        batch = len(compressed) - 1
        inner = batch + 1 + (2 if blocks else 0)
        _need(batch >= 0 and len(plain) == batch + 1 and len(values) >= inner, "parts of a wrong number of dimensions")
        _need(compressed[:-1] == plain[:-1] == values[:batch] == shape[:batch], "parts of different batches")
        _need(plain[-1] == values[batch], f"{plain[-1]} indices and {values[batch]} values")
        _need(len(shape) == batch + 2 + len(values) - inner, "values that do not fit its shape")
        _need(shape[batch + 2 :] == values[inner:], "values that do not fit its shape")
        block = values[batch + 1 : inner] if blocks else (1, 1)
        _need(all(block), "blocks without elements")
        sides = shape[batch : batch + 2]
        _need(not any(side % step for side, step in zip(sides, block, strict=True)), "blocks that do not fit its shape")
        lines = sides[0] // block[0] if rows else sides[1] // block[1]
        _need(compressed[-1] == lines + 1, f"{compressed[-1]} {names[0]} for {lines} rows or columns")

    return check


def _check_nested(parts: Mapping[str, Any]) -> None:
    _need(len(_shape(parts["values"], "values")) == 1, "values that are not flat")
    sizes, strides = _integers(parts["sizes"], "sizes"), _integers(parts["strides"], "strides")
    offsets = parts["storage_offsets"]
    if isinstance(offsets, (list, tuple)):  # before torch 2
        lengths: tuple[int, ...] = (len(offsets),)
        _need(all(type(offset) is int and offset >= 0 for offset in offsets), "offsets that are not counts")
    else:
        lengths = _integers(offsets, "offsets")
    _need(sizes == strides, "sizes and strides of different shapes")
    if math.prod(sizes) or math.prod(lengths):
        _need(len(sizes) == 2 and lengths == sizes[:1], "sizes and offsets of different counts")


def _check_meta(parts: Mapping[str, Any]) -> None:
    _constant(parts["dtype"], "dtype")
    shape, strides = _counts(parts["shape"], "a shape"), _counts(parts["strides"], "strides")
    _need(len(shape) == len(strides), "a shape and strides of different lengths")
    _elements(shape)


def _check_quantized(parts: Mapping[str, Any]) -> None:
    shape = _shape(parts["values"], "values")
    dtype = _dtype(parts["values"])
    _need(dtype in _QUANTIZED or dtype in _QUANTIZED_BITS, f"values of {dtype}, which is not quantized")
    _need(("shape" in parts) == ("strides" in parts), "only one of shape and strides")
    if "shape" in parts:
        stored, shape = math.prod(shape), _counts(parts["shape"], "a shape")
        _need(len(_counts(parts["strides"], "strides")) == len(shape), "a shape and strides of different lengths")
        _need(dtype in PACKED or dtype == "uint8", f"several values per byte of {dtype}")
        _need(_elements(shape) <= stored * PACKED.get(dtype, 4), "more values than its bytes can store")
    qscheme = _constant(parts["qscheme"], "qscheme")
    if qscheme in _PER_TENSOR:
        _need("scale" in parts and "zero_point" in parts, "no scale or zero point")
        _need(type(parts["scale"]) in (int, float), "a scale that is not a number")
        _need(type(parts["zero_point"]) is int, "a zero point that is not an integer")
        return
    _need(all(name in parts for name in ("scales", "zero_points", "axis")), "no scales, zero points or axis")
    axis = parts["axis"]
    _need(type(axis) is int and 0 <= axis < len(shape), "an axis that the reference lacks")
    for name in ("scales", "zero_points"):
        part = parts[name]
        if type(part) is list:
            _need(all(type(number) in (int, float) for number in part), f"{name} that are not numbers")
        shape_of = (len(part),) if type(part) is list else _shape(part, name)
        _need(shape_of == (shape[axis],), f"{shape_of} {name} for {shape[axis]} rows or columns")


def _check_wrapper(parts: Mapping[str, Any]) -> None:
    shape, strides = _counts(parts["shape"], "a shape"), _counts(parts["strides"], "strides")
    _need(len(shape) == len(strides), "a shape and strides of different lengths")
    _elements(shape)
    _counts((parts["storage_offset"],), "an offset")
    _constant(parts["dtype"], "dtype")
    _constant(parts["layout"], "layout")
    if type(parts["device"]) is not str:
        _constant(parts["device"], "device")


def _compressed(layout: str) -> _Check:
    rows, blocks = layout in ("sparse_csr", "sparse_bsr"), layout in ("sparse_bsr", "sparse_bsc")
    compressed, plain, *_ = parts = COMPOSITES[layout]
    return parts, (), _check_compressed(rows, blocks, (compressed, plain))


# A tensor of a class that wraps others, which are in its attributes.
_WRAPPER: _Check = (WRAPPER, (), _check_wrapper)
# For each kind: its required parts, its optional parts, and the function that checks them.
_CHECKS: dict[str, _Check] = {
    **{layout: _compressed(layout) for layout in SPARSE if layout != "sparse_coo"},
    "sparse_coo": (COMPOSITES["sparse_coo"], ("is_coalesced",), _check_coo),
    "nested": (COMPOSITES["nested"], (), _check_nested),
    "meta": (COMPOSITES["meta"], (), _check_meta),
    "quantized": (COMPOSITES["quantized"], (*chain(*QUANTIZERS), "shape", "strides"), _check_quantized),
}
