"""Live torch and numpy objects, and the nodes of a tree that stand for them.

Nothing is made from a name that was read, except from a table of these libraries' constants.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.live_objects.tensors import class_name, is_wrapper, kind_of
from ckptconv.pickles import numpy_dtypes
from ckptconv.pickles.nodes import (
    COMPOSITES,
    SPARSE,
    Composite,
    Global,
    NumpyArray,
    NumpyScalar,
    Opaque,
    Size,
    TorchConstant,
)

# Where classes are that hold open files, such as that of opened checkpoints.
_OWN = "ckptconv.features."
# The classes of the objects that `state_dicts` has taken by their state_dict(), with their number; None outside of it.
_STATED: ContextVar[dict[str, int] | None] = ContextVar("_STATED", default=None)


# ---------------------------------------------------------------------------------------------------- live to inert


@contextlib.contextmanager
def state_dicts(raw: bool) -> Iterator[dict[str, int]]:
    """Have `inert` take objects with a method state_dict, such as modules and optimizers, by what that returns, unless
    `raw`. Yield a dict, which has at the end the classes of these objects, with the number of each."""
    stated: dict[str, int] = {}
    token = _STATED.set(None if raw else stated)
    try:
        yield stated
    finally:
        _STATED.reset(token)


def inert(value: Any) -> Any:
    """Return the node that stands for a live object: a constant, a numpy value, a composite tensor, or an `Opaque`.

    An object of any other class is asked for its pickled form, or within `state_dicts` for its state dict. Raise
    UsageError if it has none.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        if isinstance(value, torch.Size):
            return Size(value)
        for kind, types in _constant_types().items():
            if isinstance(value, types):
                return TorchConstant(kind, str(value).removeprefix("torch."))
        if isinstance(value, torch.Tensor):
            return _composite(value)
    if numpy is not None:
        if isinstance(value, numpy.generic) and _is_simple(value.dtype):
            # numpy gives an element of no bytes one.
            return NumpyScalar(value.dtype.str, value.tobytes()[: value.dtype.itemsize])
        if type(value) is numpy.ndarray and _is_simple(value.dtype):
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            return NumpyArray(value.dtype.str, value.shape, order, value.tobytes(order))
    if isinstance(value, (type, FunctionType)) or (
        isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (ModuleType, type(None)))
    ):
        return Global(value.__module__ or "builtins", value.__qualname__)
    stated = _STATED.get()
    if stated is not None and isinstance(value, MethodType) and value.__name__ == "state_dict":
        hint = "Call the method: state_dict()."
        raise UsageError(f"The tree contains the method {value.__qualname__}, not its result.", hint)
    if stated is not None and callable(getattr(type(value), "state_dict", None)):
        name = class_name(type(value))
        stated[name] = stated.get(name, 0) + 1
        return _state_dict(value, name)
    return _reduced(value)


def _state_dict(value: Any, name: str) -> dict[Any, Any]:
    """Return the state dict of an object of the class `name`. Raise UsageError if it gives none."""
    hint = "Put into the state what its load_state_dict takes."
    try:
        state = value.state_dict()
    except Exception as error:
        problem = f"whose state_dict() failed: {type(error).__name__}: {str(error).rstrip('.')}."
        raise UsageError(f"The tree contains a {name}, {problem}", hint) from error
    if not isinstance(state, Mapping):
        raise UsageError(f"The tree contains a {name}, whose state_dict() returned a {type(state).__name__}.", hint)
    return state if isinstance(state, dict) and type(state) in (dict, OrderedDict) else dict(state)


def _reduced(value: Any) -> Global | Opaque:
    if type(value).__module__.startswith(_OWN):
        raise UsageError(
            f"The tree contains a {class_name(type(value))}, a handle with paths and store settings, which cannot be "
            "saved.",
            "Replace the handle with its tensors.",
        )
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise UsageError(
            f"The tree contains a {class_name(type(value))}, which cannot be recorded as data: "
            f"{str(error).rstrip('.')}.",
            "Remove it, or put its contents into plain containers.",
        ) from error
    if isinstance(reduced, str):
        return Global(value.__module__, reduced)
    function, args, state, appended, items = (*reduced, None, None, None)[:5]
    kwargs, call = None, "reduce"
    if getattr(function, "__module__", None) == "copyreg":
        if function.__name__ == "__newobj__":
            function, args, call = args[0], args[1:], "newobj"
        elif function.__name__ == "__newobj_ex__":
            (function, args, kwargs), call = args, "newobj_ex"
    return Opaque(
        function, args, kwargs, call, [] if state is None else [state], list(appended or ()), list(items or ())
    )


def _is_simple(dtype: Any) -> bool:
    """Return whether numpy's dtype string describes a dtype fully, and the elements are bytes."""
    return dtype.kind in "biufcmMSU" or (dtype.str[1] == "V" and dtype.names is None and dtype.type.__name__ == "void")


@functools.cache
def _constant_types() -> dict[str, type]:
    torch = sys.modules["torch"]
    return {kind: getattr(torch, kind) for kind in ("dtype", "device", "layout", "qscheme", "memory_format")}


# ------------------------------------------------------------------------------------------- tensors made of several


# Layouts of compressed sparse tensors, with the names of their two index tensors.
_COMPRESSED = {kind: COMPOSITES[kind][:2] for kind in SPARSE if kind != "sparse_coo"}


def _composite(tensor: Any) -> Any:
    """Return the node of a tensor that is not plain: its parts, or the call that its class is made by. Raise UsageError
    if there is neither."""
    torch = sys.modules["torch"]
    if is_wrapper(tensor):
        fields = {"dtype": tensor.dtype, "shape": Size(tensor.shape), "strides": tuple(tensor.stride())}
        fields |= {"storage_offset": tensor.storage_offset(), "layout": tensor.layout, "device": tensor.device}
        fields |= {"requires_grad": tensor.requires_grad, "attributes": torch._utils._get_obj_state(tensor)}
        return Composite(class_name(type(tensor)), fields)
    kind = "meta" if tensor.device.type == "meta" else str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        kind = "quantized"
    elif tensor.is_nested and tensor.layout is torch.strided:
        kind = "nested"
    take_apart = _PARTS.get(kind)
    if take_apart is None:
        return _reduced(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and quantized tensors warn that they are beta or deprecated
        parts = take_apart(tensor.detach())
    if tensor.requires_grad or kind == "meta":
        parts["requires_grad"] = tensor.requires_grad
    if vars(tensor):
        parts["attributes"] = vars(tensor)
    if kind_of(tensor) != "tensor":
        parts["class"] = kind_of(tensor)
    return Composite(kind, parts)


def _quantized_parts(tensor: Any) -> dict[str, Any]:
    parts = {"values": tensor.int_repr(), "qscheme": tensor.qscheme()}
    if parts["values"].numel() != tensor.numel():  # several values in a byte
        parts |= {"shape": Size(tensor.shape), "strides": tuple(tensor.stride())}
    if tensor.qscheme() == sys.modules["torch"].per_tensor_affine:
        return parts | {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return parts | {
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
        "axis": tensor.q_per_channel_axis(),
    }


# The parts of each kind of composite, as a pickle has them.
_PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "meta": lambda t: {"dtype": t.dtype, "shape": Size(t.shape), "strides": tuple(t.stride())},
    "sparse_coo": lambda t: {
        "indices": t._indices(),
        "values": t._values(),
        "shape": Size(t.shape),
        "is_coalesced": t.is_coalesced(),
    },
    "nested": lambda t: {
        "values": t.values(),
        "sizes": t._nested_tensor_size(),
        "strides": t._nested_tensor_strides(),
        "storage_offsets": t._nested_tensor_storage_offsets(),
    },
    "quantized": _quantized_parts,
} | {
    layout: lambda t, indices=indices: (
        {name: getattr(t, name)() for name in (*indices, "values")} | {"shape": Size(t.shape)}
    )
    for layout, indices in _COMPRESSED.items()
}

# Functions that make each kind of composite, by the names of its parts.
_MAKERS: dict[tuple[str, frozenset[str]], Callable[[Any, dict[str, Any]], Any]] = {
    ("meta", frozenset({"dtype", "shape", "strides"})): lambda torch, p: torch.empty_strided(
        p["shape"], p["strides"], dtype=p["dtype"], device="meta"
    ),
    ("sparse_coo", frozenset({"indices", "values", "shape"})): lambda torch, p: torch.sparse_coo_tensor(
        p["indices"], p["values"], p["shape"], check_invariants=True
    ),
    ("sparse_coo", frozenset({"indices", "values", "shape", "is_coalesced"})): lambda torch, p: torch.sparse_coo_tensor(
        p["indices"], p["values"], p["shape"], is_coalesced=p["is_coalesced"], check_invariants=True
    ),
    ("nested", frozenset({"values", "sizes", "strides", "storage_offsets"})): lambda torch, p: (
        torch._nested_view_from_buffer(p["values"], p["sizes"], p["strides"], p["storage_offsets"])
    ),
    ("quantized", frozenset({"values", "qscheme", "scale", "zero_point"})): lambda torch, p: (
        torch._make_per_tensor_quantized_tensor(p["values"], p["scale"], p["zero_point"])
    ),
    ("quantized", frozenset({"values", "qscheme", "scales", "zero_points", "axis"})): lambda torch, p: (
        torch._make_per_channel_quantized_tensor(p["values"], p["scales"], p["zero_points"], p["axis"])
    ),
} | {
    (layout, frozenset({*indices, "values", "shape"})): lambda torch, p, layout=layout, indices=indices: (
        torch.sparse_compressed_tensor(
            *(p[name] for name in indices),
            p["values"],
            p["shape"],
            layout=getattr(torch, layout),
            check_invariants=True,
        )
    )
    for layout, indices in _COMPRESSED.items()
}


def _assemble(node: Composite) -> Any:
    """Return the torch tensor that `node` describes, without attributes; `node` itself if its parts are unknown."""
    torch = sys.modules["torch"]
    parts = dict(node.parts)
    kind, grad, _ = (parts.pop(name, None) for name in ("class", "requires_grad", "attributes"))
    make = _MAKERS.get((node.kind, frozenset(parts)))
    if make is None:
        return node
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tensor = make(torch, parts)
            if kind == "parameter":
                return torch.nn.Parameter(tensor, requires_grad=bool(grad))
            return tensor.requires_grad_() if grad else tensor
        except (RuntimeError, TypeError, ValueError):
            return node


# ---------------------------------------------------------------------------------------------------- inert to live


@functools.cache
def _constants() -> dict[tuple[str, str], Any]:
    torch = sys.modules["torch"]
    types = _constant_types()
    return {
        (kind, str(value).removeprefix("torch.")): value
        for kind in ("dtype", "layout", "qscheme", "memory_format")
        for value in vars(torch).values()
        if isinstance(value, types[kind])
    }


def revived(node: Any) -> Any:
    """Return the live object that `node` stands for; `node` itself if there is none."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kind = type(node)
    if torch is not None:
        if kind is Size:
            return torch.Size(node)
        if kind is Composite:
            return _assemble(node)
        if kind is TorchConstant and node.kind == "device":
            try:
                return torch.device(node.name)
            except RuntimeError:
                return node
        if kind is TorchConstant:
            return _constants().get((node.kind, node.name), node)
    if numpy is not None and kind in (NumpyScalar, NumpyArray) and numpy_dtypes.parsed(node.dtype):
        try:
            return _numpy_value(node)
        except (TypeError, ValueError):
            return node
    return node


def _numpy_value(node: NumpyScalar | NumpyArray) -> Any:
    numpy = sys.modules["numpy"]
    dtype = numpy.dtype(node.dtype)
    shape, order = (node.shape, node.order) if type(node) is NumpyArray else ((), "C")
    if len(node.data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("the size of the data does not match its shape and dtype")
    array = numpy.ndarray(shape, dtype, bytearray(node.data), order=order).copy(order)
    return array if type(node) is NumpyArray else array[()]
