"""Turns torch's pickles into data: tensors, their storages, and constants such as dtypes and devices.

The names and argument lists come from `torch/_utils.py`, `torch/_tensor.py` and `torch/serialization.py`, from the
first releases to torch 2.13. The containers (zip, stream, tar) differ only in where a storage lies. Each passes
`vocabulary` a function that resolves a storage, and shares the rest.

Nothing that a pickle says about a tensor is trusted: each view must lie inside its storage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.formats.torch.storages import STORAGE_CLASSES, Storage, in_order
from ckptconv.pickles import torch_constants
from ckptconv.pickles.nodes import Composite, Global, Opaque, Size, TorchConstant
from ckptconv.pickles.vocabulary import Builder, Constructor, MalformedError, Vocabulary
from ckptconv.tensors.dtypes import DType, is_differentiable, itemsize_of_components
from ckptconv.tensors.lazy import LazyTensor, Stored, Tagged, TensorFacts
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS
from ckptconv.text import brief

# A file has many tensors, but few shapes: tensors share the tuples of up to this many shapes.
_SHAPES_KEPT = 1024
_INTEGERS = frozenset((int,))
# Tensor classes, which torch pickled by name until 0.1.10, and classes of Variables, until 0.3.
_TENSORS = tuple(
    Global(module, f"{kind}Tensor")
    for module in ("torch", "torch.cuda")
    for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
)
_VARIABLES = (Global("torch.autograd.variable", "Variable"), Global("torch.nn.parameter", "Parameter"))


# ---------------------------------------------------------------------------------------------------------- tensors


class _Geometry(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    numel: int
    extent: int  # elements from the first to the last, inclusive


def _geometry(size: Any, stride: Any) -> _Geometry:
    """Check a size and strides, which may be of any type. Raises MalformedError."""
    if not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise MalformedError("has a tensor whose size or stride is not a tuple")
    if len(size) != len(stride) or len(size) > MAX_DIMS:
        raise MalformedError(f"has a tensor of {len(size)} dimensions and {len(stride)} strides")
    for number in (*size, *stride):
        if type(number) is not int or not 0 <= number < MAX_BYTES:
            raise MalformedError("has a tensor whose size or stride does not consist of non-negative integers")
    numel = math.prod(size)
    if numel >= MAX_BYTES:
        raise MalformedError(f"has a tensor of {brief(numel)} elements, too many for any storage")
    extent = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True)) if numel else 0
    return _Geometry(tuple(size), tuple(stride), numel, extent)


def _start(dtype: DType, geometry: _Geometry, offset: int, size: int, key: str) -> int:
    """Return the byte offset in its storage of a tensor whose first element is `offset`; 0 for an empty tensor.

    Raises MalformedError unless the whole tensor lies within the storage's `size` bytes.
    """
    shape, strides, numel, extent = geometry
    item = dtype.itemsize
    if not numel:
        return 0
    start = offset * item
    if start + extent * item > size or numel * item >= MAX_BYTES:
        raise MalformedError(
            f"has a tensor of {dtype} with shape {brief(shape)} and strides {brief(strides)} at element "
            f"{brief(offset)}, which extends beyond the {size} bytes of its storage {brief(key)}"
        )
    return start


class Tensors:
    """Rebuilds tensors. Remembers shapes, so that tensors of one shape share the tuples."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, Any], _Geometry] = {}

    def geometry(self, size: Any, stride: Any) -> _Geometry:
        # Tuples are hashed only if all their elements are plain integers: hashing others could take forever.
        if type(size) is type(stride) is tuple and _INTEGERS.issuperset(map(type, size + stride)):
            known = self._kept.get((size, stride))
            if known is None:
                known = _geometry(size, stride)
                if len(self._kept) < _SHAPES_KEPT:
                    self._kept[size, stride] = known
            return known
        return _geometry(size, stride)

    def view(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        requires_grad: Any = False,
        dtype: DType | None = None,
        metadata: Any = None,
    ) -> Any:
        """Return a tensor of `size` and `stride` (in elements) that begins at element `offset` of `storage`."""
        if type(storage) is not Storage:
            return unknown("a tensor", storage)
        geometry = self.geometry(size, stride)
        shape, strides = geometry.shape, geometry.strides
        if dtype is None:
            dtype = storage.dtype
        if type(offset) is not int or offset < 0:
            raise MalformedError("has a tensor whose storage offset is not a non-negative integer")
        if type(requires_grad) is not bool:
            raise MalformedError("has a tensor whose requires_grad is not a bool")
        if requires_grad and not is_differentiable(dtype.name):
            raise MalformedError(f"has a tensor of {dtype} that requires gradients")
        if storage.meta:
            return _later("composites", "meta")(TorchConstant("dtype", dtype.name), shape, strides, requires_grad)
        start = _start(dtype, geometry, offset, storage.size, storage.key)
        tensor: LazyTensor = Stored(storage.file, storage.offset + start, dtype, shape, strides)
        if storage.swapped:
            if itemsize_of_components(dtype) != itemsize_of_components(storage.dtype):
                raise MalformedError(
                    f"has a big-endian storage {storage.key[:40]!r} of {storage.dtype} that contains a tensor of "
                    f"{dtype}, whose bytes torch.load does not swap"
                )
            tensor = in_order(tensor, storage)
        if metadata:
            tensor = _later("unusual", "resolved")(tensor, metadata)
        facts = TensorFacts("tensor", requires_grad, None, storage.identity, storage.size, offset, strides)
        return Tagged(tensor, facts)

    # Each of these methods takes the arguments of torch's function of the same name.

    def rebuild_tensor(self, args: tuple[Any, ...]) -> Any:
        check_arguments(args, "_rebuild_tensor", 4)
        return self.view(*args)

    def rebuild_tensor_v2(self, args: tuple[Any, ...]) -> Any:
        check_arguments(args, "_rebuild_tensor_v2", 6, 7)
        storage, offset, size, stride, requires_grad, _hooks, *metadata = args
        return self.view(storage, offset, size, stride, requires_grad, None, *metadata)


def check_arguments(args: tuple[Any, ...], name: str, *counts: int) -> None:
    """Raise MalformedError unless the number of arguments is one that some release of torch passes to `name`."""
    if len(args) not in counts:
        raise MalformedError(f"calls {name} with {len(args)} arguments, but it takes {' or '.join(map(str, counts))}")


def unknown(result: str, value: Any) -> Any:
    """Return NotImplemented if `value` is Opaque: the call with `result` then becomes an `Opaque` too.

    Raises MalformedError for any other value: it does not give a `result`, as messages call it.
    """
    if type(value) is Opaque:
        return NotImplemented
    raise MalformedError(f"creates {result} from a value of type {type(value).__name__}")


KINDS = {
    Global("torch", "Tensor"): "tensor",
    Global("torch._tensor", "Tensor"): "tensor",
    Global("torch.nn.parameter", "Parameter"): "parameter",
    Global("torch.nn.parameter", "Buffer"): "buffer",
}


def described(leaf: Any, kind: str, requires_grad: bool | None, attributes: Any) -> Any:
    """Return `leaf` as a tensor of `kind` with `attributes`. If `requires_grad` is None, keep that of `leaf`."""
    if attributes is not None:
        from ckptconv.structure.attributes import attributes_fault

        fault = attributes_fault(kind, attributes)
        if fault:
            raise MalformedError(f"has a tensor with {fault}")
    if type(leaf) is Composite:
        parts = dict(leaf.parts)
        if requires_grad is not None:
            parts["requires_grad"] = requires_grad
        if attributes:
            parts["attributes"] = attributes
        if leaf.kind == "meta" and attributes and kind not in KINDS.values():
            # A class that wraps other tensors, its attributes, and says that it is on no device.
            more = {"storage_offset": 0, "layout": TorchConstant("layout", "strided")}
            parts |= {**more, "device": TorchConstant("device", "meta")}
            return Composite(kind, parts)
        if kind not in ("tensor", leaf.kind):
            parts["class"] = kind
        return Composite(leaf.kind, parts)
    if type(leaf) is not Tagged:
        return unknown(f"a {kind[:100]}", leaf)
    facts = leaf.facts
    if requires_grad and not is_differentiable(leaf.dtype.name):
        raise MalformedError(f"has a {kind[:100]} of {leaf.dtype} that requires gradients")
    return Tagged(
        leaf.tensor,
        TensorFacts(
            kind,
            facts.requires_grad if requires_grad is None else requires_grad,
            attributes or None,
            facts.storage,
            facts.storage_nbytes,
            facts.storage_offset,
            facts.strides,
        ),
    )


def _rebuild_parameter(args: tuple[Any, ...]) -> Any:
    """Take (data, requires_grad, hooks[, state])."""
    check_arguments(args, "_rebuild_parameter", 3, 4)
    if type(args[1]) is not bool:
        raise MalformedError("has a parameter whose requires_grad is not a bool")
    return described(args[0], "parameter", args[1], args[3] if len(args) == 4 else None)


def _made_without_state(cls: Global) -> Constructor:
    """Return a constructor for a tensor, Variable or Parameter of torch before 0.4; its BUILD completes the value."""
    return lambda args: Opaque(cls, args)


def _rebuild_from_type(args: tuple[Any, ...], rebuild: dict[Global, Constructor]) -> Any:
    """Take (function, class, arguments of the function, state)."""
    check_arguments(args, "_rebuild_from_type", 4)
    function, cls, inner, state = args
    if type(cls) is not Global:
        return unknown("a tensor of a class", cls)
    construct = rebuild.get(function) if type(function) is Global else None
    if construct is None:
        # The function is the user's own, or a call returned it.
        return NotImplemented if type(function) is Global else unknown("a tensor by a function", function)
    if type(inner) is not tuple:
        raise MalformedError(f"has a tensor of {str(cls)[:100]} whose arguments are not a tuple")
    leaf = construct(inner)
    if leaf is NotImplemented:
        return NotImplemented
    kind = KINDS.get(cls, str(cls))
    if kind == "tensor" and type(state) is dict and state.get("_is_buffer") is True:
        kind = "buffer"  # nn.Buffer makes a plain tensor with this attribute
    return described(leaf, kind, None, state)


# The modules of numpy whose functions its pickles call.
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")


def _later(module: str, function: str, *first: Any) -> Callable[..., Any]:
    """Return a function that imports `module` next to this one at its call, and calls `function` there with some
    arguments before the others: for values of numpy, for composite tensors, and for those that few pickles have."""
    return lambda *args: getattr(import_module(f"ckptconv.formats.torch.{module}"), function)(*first, *args)


# ------------------------------------------------------------------------------------------------ constants of torch

# Other names of these dtypes.
_ALIASES = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
}  # fmt: skip
CONSTANTS: dict[tuple[str, str], Any] = {
    **{("torch", name): TorchConstant(kind, name) for kind, names in torch_constants.NAMES.items() for name in names},
    **{("torch", alias): TorchConstant("dtype", name) for alias, name in _ALIASES.items()},
}


def _size(args: tuple[Any, ...]) -> Any:
    counts = args[0] if len(args) == 1 else ()
    if len(args) > 1 or type(counts) not in (tuple, list, Size) or any(type(n) is not int for n in counts):
        raise MalformedError("has a torch.Size that does not consist of integers")
    return Size(counts)


def _device(args: tuple[Any, ...]) -> Any:
    # The index is part of the name, or a second argument.
    indices = [index for index in args[1:2] if type(index) is int and index.bit_length() < 16]
    sound = 1 <= len(args) == 1 + len(indices) and type(args[0]) is str
    device = TorchConstant("device", ":".join(map(str, args))) if sound else None
    if not device or not torch_constants.has(device):
        raise MalformedError("has an invalid torch.device")
    return device


def _layout(args: tuple[Any, ...]) -> Any:
    """Take the name of a layout, such as ("torch.strided",)."""
    named = args[0].removeprefix("torch.") if len(args) == 1 and type(args[0]) is str else ""
    constant = CONSTANTS.get(("torch", named))
    if constant is None or constant.kind != "layout":
        raise MalformedError(f"has a layout {named[:40]!r}, which torch lacks")
    return constant


# ------------------------------------------------------------------------------------------------------- vocabulary


# Constructors for the functions in torch._utils that remember no shapes.
_REBUILDING: dict[Global, Constructor] = {
    Global("torch._utils", name): made
    for name, made in {
        "_rebuild_parameter": _rebuild_parameter,
        "_rebuild_parameter_with_state": _rebuild_parameter,
        "_rebuild_device_tensor_from_cpu_tensor": _later("unusual", "rebuild_device_tensor"),
        "_rebuild_device_tensor_from_numpy": _later("unusual", "rebuild_device_tensor"),
        "_rebuild_xla_tensor": _later("unusual", "rebuild_device_tensor"),
    }.items()
}
_CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("numpy", "dtype"): _later("numpy_objects", "made_dtype"),
    **{
        (module, "_reconstruct"): _later("numpy_objects", "made_array", Global(module, "_reconstruct"))
        for module in _MULTIARRAY
    },
    **{(module, "scalar"): _later("numpy_objects", "scalar") for module in _MULTIARRAY},
    **{
        (module.replace("multiarray", "numeric"), "_frombuffer"): _later("numpy_objects", "from_buffer")
        for module in _MULTIARRAY
    },
    **{(cls.module, cls.name): _made_without_state(cls) for cls in (*_TENSORS, *_VARIABLES)},
}
_BUILDERS: dict[tuple[str, str], Builder] = {
    **{(cls.module, cls.name): _later("unusual", "build_variable") for cls in _VARIABLES},
    **{(module, "_reconstruct"): _later("numpy_objects", "build_array") for module in _MULTIARRAY},
}


def vocabulary(storage: Callable[[Any], Any]) -> Vocabulary:
    """Return the vocabulary that reads everything that torch writes as data.

    `storage` resolves a persistent id, usually with `storage_id`. Tensors become `Tagged` leaves whose facts name the
    storage by its identity. Tensors that consist of several (sparse, quantized, nested, of a wrapper subclass) or have
    no data (meta) become `Composite`s.
    """
    tensors = Tensors()
    rebuild: dict[Global, Constructor] = {
        **_REBUILDING,
        Global("torch._utils", "_rebuild_tensor"): tensors.rebuild_tensor,
        Global("torch._utils", "_rebuild_tensor_v2"): tensors.rebuild_tensor_v2,
        Global("torch._utils", "_rebuild_tensor_v3"): _later("unusual", "rebuild_tensor_v3", tensors),
        Global("torch._utils", "_rebuild_sparse_tensor"): _later("composites", "sparse"),
        Global("torch._utils", "_rebuild_sparse_csr_tensor"): _later("composites", "sparse"),
        Global("torch._utils", "_rebuild_nested_tensor"): _later("composites", "nested"),
        Global("torch._utils", "_rebuild_qtensor"): _later("composites", "quantized", tensors),
        Global("torch._utils", "_rebuild_meta_tensor_no_storage"): _later("composites", "on_meta", tensors),
        Global("torch._utils", "_rebuild_wrapper_subclass"): _later("composites", "wrapper_subclass", tensors),
    }

    def from_type(args: tuple[Any, ...]) -> Any:
        return _rebuild_from_type(args, rebuild)

    constructors: dict[tuple[str, str], Constructor] = {
        **_CONSTRUCTORS,
        **{(function.module, function.name): constructor for function, constructor in rebuild.items()},
        ("torch._tensor", "_rebuild_from_type_v2"): from_type,
        ("torch._tensor", "_rebuild_from_type"): from_type,
        ("torch.tensor", "_rebuild_from_type"): from_type,
    }
    build_typed = _later("unusual", "build_typed", tensors)
    builders = {**_BUILDERS, **{(cls.module, cls.name): build_typed for cls in _TENSORS}}
    return Vocabulary(constructors, CONSTANTS, STORAGE_CLASSES, builders, storage)


@functools.cache
def without_tensors() -> Vocabulary:
    """Return the vocabulary for pickles whose names and calls alone matter. It rebuilds no tensors."""
    words = vocabulary(lambda pid: None)
    constructors = {
        name: constructor
        for name, constructor in words.constructors.items()
        if name[0] != "torch._utils" and not name[1].startswith("_rebuild_from_type")
    }
    return words._replace(constructors=constructors, persistent=None)
