"""Live torch and numpy objects, and the nodes of a tree that stand for them.

Neither library is imported here: a tree cannot hold objects of a library that is not imported. Nothing is made from a
name that was read, except from a table of these libraries' constants.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
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
from ckptconv.structure.leaves import class_name, is_plain, is_wrapper, kind_of
from ckptconv.tensors.strides import is_contiguous

# A storage is rebuilt for its views unless that takes more than _SPREAD times their own memory, plus _SPARE bytes.
_SPREAD = 64
_SPARE = 1 << 20
# Where classes are that hold open files, such as that of opened checkpoints.
_OWN = "ckptconv.features."


# ---------------------------------------------------------------------------------------------------- live to inert


def inert(value: Any) -> Any:
    """Return the node that stands for a live object: a constant, a numpy value, a composite tensor, or an `Opaque`.

    An object of any other class is asked for its pickled form. Raise UsageError if it has none.
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
    return _reduced(value)


def _reduced(value: Any) -> Global | Opaque:
    if type(value).__module__.startswith(_OWN):
        raise UsageError(
            f"The tree holds a {class_name(type(value))}, a handle with paths and store settings, which cannot be "
            "saved.",
            "Put its tensors into the tree instead.",
        )
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise UsageError(
            f"The tree holds a {class_name(type(value))}, which cannot be recorded as data: {str(error).rstrip('.')}.",
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
    """Whether numpy's dtype string describes a dtype fully, and its elements are bytes."""
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
        raise ValueError("the data is not of this size")
    array = numpy.ndarray(shape, dtype, bytearray(node.data), order=order).copy(order)
    return array if type(node) is NumpyArray else array[()]


def tensor(leaf: Any, kind: str, requires_grad: bool, strides: Sequence[int] | None, fresh: bool) -> Any:
    """Return a torch tensor with the data of `leaf`: of this kind, requiring gradients, laid out by `strides`
    (elements).

    It is a new object if it has to be, or if `fresh`.
    """
    torch = sys.modules["torch"]
    data = leaf
    if strides is not None and strides != tuple(leaf.stride()) and len(strides) == leaf.dim():
        data = torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device)
        _bits(data).copy_(_bits(leaf))
    if kind == "parameter":
        return torch.nn.Parameter(data.detach(), requires_grad=requires_grad and _differentiable(data))
    if kind == "buffer" and hasattr(torch.nn, "Buffer"):
        data = torch.nn.Buffer(data.detach())
    elif fresh or requires_grad or data.requires_grad:
        data = data.detach()
    return data.requires_grad_() if requires_grad and _differentiable(data) else data


def storage(tensor: Any) -> Any:
    """Return a typed storage, as torch.load returns it, with the elements of a flat tensor."""
    torch = sys.modules["torch"]
    typed = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    hold(typed, tensor)
    return typed


def hold(storage: Any, tensor: Any) -> None:
    """Make a flat tensor's elements those of a typed storage: its own memory, even in the middle of a larger one."""
    memory, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    if (start, memory.nbytes()) != (0, tensor.nbytes):
        memory = memory[start : start + tensor.nbytes]
    storage._untyped_storage = memory


def _differentiable(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _bits(tensor: Any) -> Any:
    """Return the same elements as integers: no operation on these changes a bit."""
    torch = sys.modules["torch"]
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class LiveView(NamedTuple):
    """A torch tensor, and its offset and strides in a storage (in elements)."""

    tensor: Any
    offset: int
    strides: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The offset of the first byte it touches, and that after the last."""
        last = sum((extent - 1) * stride for extent, stride in zip(self.tensor.shape, self.strides, strict=True))
        item = self.tensor.element_size()
        return self.offset * item, (self.offset + last + 1) * item

    @property
    def place(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return self.offset, self.tensor.element_size(), self.strides, tuple(self.tensor.shape)


def share(views: Sequence[LiveView], storage_nbytes: int) -> None:
    """Make tensors views of one storage, in place, with their values. If overlapping values disagree, do nothing.

    The storage has `storage_nbytes` bytes if the views cover at least half of it, else the span of the views. Bytes
    that no view covers are zero.
    """
    first = views[0]
    if len(views) < 2 or _lie_so_already(views):
        return
    contiguous = is_contiguous(first.tensor.shape, first.strides)
    if contiguous and all(view.place == first.place for view in views):
        if all(_equal(first.tensor, view.tensor) for view in views[1:]):
            data = first.tensor.detach().contiguous()
            for view in views:
                view.tensor.data = data.view(view.tensor.dtype)
        return
    pieces = _rebuilt(views, storage_nbytes)
    for view, piece in zip(views, pieces, strict=False):
        view.tensor.data = piece


def _lie_so_already(views: Sequence[LiveView]) -> bool:
    """Whether the tensors already are these views, as when they never left memory."""
    origins = {(v.tensor.untyped_storage().data_ptr(), v.tensor.data_ptr() - v.span[0]) for v in views}
    return len(origins) == 1 and all(tuple(view.tensor.stride()) == view.strides for view in views)


def same(left: Any, right: Any) -> bool:
    """Whether two torch tensors of one dtype and shape have the same bits; those at one address are not read."""
    if not is_plain(left) or not is_plain(right):
        return left is right
    together = left.data_ptr() == right.data_ptr() and left.stride() == right.stride()
    return together or _equal(left, right)


def _equal(left: Any, right: Any) -> bool:
    return bool(sys.modules["torch"].equal(_bits(left), _bits(right)))


def _rebuilt(views: Sequence[LiveView], storage_nbytes: int) -> list[Any]:
    """Return new tensors with the values of `views`, laid out in one storage; [] if that is impossible."""
    torch = sys.modules["torch"]
    spans = [view.span for view in views]
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    covered = sum(min(view.tensor.nbytes, high - low) for view, (low, high) in zip(views, spans, strict=True))
    low, high = (0, storage_nbytes) if storage_nbytes <= 2 * covered else (low - low % 16, high)
    if high - low > _SPREAD * covered + _SPARE:
        return []
    storage = torch.zeros(high - low, dtype=torch.uint8, device=views[0].tensor.device).untyped_storage()
    pieces = []
    for view in views:
        source = view.tensor.detach()
        piece = torch.empty(0, dtype=source.dtype, device=source.device).set_(
            storage, view.offset - low // source.element_size(), source.shape, view.strides
        )
        _fill(_bits(piece), _bits(source))
        pieces.append(piece)
    return pieces if all(_equal(piece, view.tensor) for piece, view in zip(pieces, views, strict=True)) else []


def _fill(target: Any, source: Any) -> None:
    """Copy `source` into `target`, whose elements may overlap."""
    torch = sys.modules["torch"]
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    reach = 0
    overlaps = False
    for stride, extent in sorted((s, e) for s, e in zip(target.stride(), target.shape, strict=True) if e > 1):
        overlaps |= stride <= reach
        reach += (extent - 1) * stride
    if not overlaps:
        target.copy_(source)
        return
    # Overlapping windows: torch copies into such a tensor only by index.
    line = torch.as_strided(target, (reach + 1,), (1,), target.storage_offset())
    places = torch.arange(reach + 1).as_strided(target.shape, target.stride(), 0)
    line[places.reshape(-1)] = source.reshape(-1)
