"""Turns what torch pickles into data: tensors, their storages, and constants such as dtypes and devices.

The names and argument lists come from `torch/_utils.py`, `torch/_tensor.py` and `torch/serialization.py`, from the
first releases to torch 2.13. The containers (zip, stream, tar) differ only in where a storage lies. Each passes
`vocabulary` a function that resolves a storage, and shares the rest.

Nothing that a pickle says about a tensor is trusted: each view must lie inside its storage.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ckptconv.errors import UnsupportedError
from ckptconv.pickles import numpy_dtypes, torch_constants
from ckptconv.pickles.fastpath import TensorPhrases
from ckptconv.pickles.nodes import (
    COMPOSITES,
    QUANTIZERS,
    SPARSE,
    Composite,
    Global,
    NumpyArray,
    NumpyScalar,
    Opaque,
    Size,
    TorchConstant,
)
from ckptconv.pickles.vocabulary import Builder, Constructor, Maker, MalformedError, Phrase, RefusedError, Vocabulary
from ckptconv.structure.soundness import (
    MAX_BYTES,
    MAX_DIMS,
    PACKED,
    attributes_fault,
    composite_fault,
    is_differentiable,
)
from ckptconv.tensors.dtypes import DTYPES, DType, itemsize_of_components
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor, Stored, Tagged, TensorFacts
from ckptconv.tensors.moves import Cast, Conjugate, File, Negate, Swap
from ckptconv.text import brief

_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_HOOKS = Global("collections", "OrderedDict")
# Tensors are many and their shapes few: tensors share the tuples of up to this many shapes.
_SHAPES_KEPT = 1024


# --------------------------------------------------------------------------------------------------------- storages


class Storage(Tagged):
    """The memory that tensors are views of: `size` bytes from byte `offset` of `file`.

    A pickle may contain a bare storage. It is then a leaf itself: one-dimensional, with the dtype of its class (uint8
    for an untyped storage). Tensors have the same `identity` if, and only if, they share a storage. `meta`: it has no
    data. `swapped`: the byte order of the file is not little-endian.
    """

    # Most storages are never leaves: `tensor` and `facts` are computed on demand, and not compared.
    __slots__ = ("dtype", "file", "identity", "key", "meta", "offset", "size", "swapped")
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self,
        file: File,
        offset: int,
        size: int,
        dtype: DType,
        key: str,
        identity: Hashable,
        meta: bool = False,
        swapped: bool = False,
    ) -> None:
        self.file = file
        self.offset = offset
        self.size = size
        self.dtype = dtype  # type: ignore[misc]
        self.key = key
        self.identity = identity
        self.meta = meta
        self.swapped = swapped

    @property
    def tensor(self) -> LazyTensor:  # type: ignore[override]
        if self.meta:
            raise UnsupportedError(
                f"{self.file.path} lacks the data of storage {self.key[:100]!r}, saved from the meta device.",
                "Save the checkpoint again with its weights loaded.",
            )
        count = self.size // self.dtype.itemsize
        return _in_order(Stored(self.file, self.offset, self.dtype, (count,), (1,)), self)

    @property
    def facts(self) -> TensorFacts:  # type: ignore[override]
        return TensorFacts("storage", storage=self.identity, storage_nbytes=self.size, strides=(1,))


class StorageId(NamedTuple):
    """The parts of a persistent id. `key` names the storage; `numel` is its size in elements of `dtype`.

    `view` is the sixth part of the id, which only the stream format has.
    """

    dtype: DType
    key: str
    location: str
    numel: int
    view: Any = None


# For persistent ids that differ only in the key: a function from keys to the storages' file, byte offsets and
# identities. It ends before the first that must be resolved in full; None if all must.
Places: TypeAlias = Callable[
    [StorageId], Callable[[Sequence[str]], tuple[File, Sequence[int], Sequence[Hashable]]] | None
]

_STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QUInt8": "quint8",
    "QInt8": "qint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
    "Untyped": "uint8",
    "_Untyped": "uint8",
    # Of TorchScript, which names the storages of new dtypes too.
    "ComplexHalf": "complex32",
    **{name[:1].upper() + name[1:]: name for name in DTYPES if name.startswith(("float8_", "float4_", "bits"))},
    **{f"UInt{bits}": f"uint{bits}" for bits in (16, 32, 64)},
}
# Tensor classes, which torch pickled by name until 0.1.10, and classes of Variables, until 0.3.
_TENSOR_DTYPES = {
    Global(module, f"{kind}Tensor"): DTYPES[_STORAGE_DTYPES[kind]]
    for module in ("torch", "torch.cuda")
    for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
}
_VARIABLES = (Global("torch.autograd.variable", "Variable"), Global("torch.nn.parameter", "Parameter"))
_STORAGE_CLASS = re.compile(r"(\w+?)Storage(?:Base)?")


def storage_dtype(cls: Any) -> DType | None:
    """Return the dtype of a storage class, such as torch.FloatStorage or torch.cuda.HalfStorage; None for others."""
    return _storage_dtype(cls) if type(cls) is Global else None


@functools.lru_cache(maxsize=256)
def _storage_dtype(cls: Global) -> DType | None:
    named = _STORAGE_CLASS.fullmatch(cls.name) if cls.module.split(".")[0] == "torch" else None
    return DTYPES.get(_STORAGE_DTYPES.get(named[1], "")) if named else None


def storage_id(pid: Any) -> StorageId:
    """Parse a persistent id ("storage", class, key, location, numel[, view]).

    Raises MalformedError for any other, RefusedError for an unknown storage class.
    """
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise MalformedError("has a persistent id that is not one of a storage")
    _, cls, key, location, numel = pid[:5]
    dtype = storage_dtype(cls)
    if dtype is None:
        raise RefusedError(f"has a storage of class {brief(cls, 200)}, which is not known")
    # Keys are text, but integers in the oldest files.
    if type(key) is int and -MAX_BYTES < key < MAX_BYTES:
        key = str(key)
    if type(key) is not str or type(location) is not str or type(numel) is not int:
        raise MalformedError("has a persistent id whose parts are of the wrong types")
    if not 0 <= numel < MAX_BYTES // dtype.itemsize:
        raise MalformedError(f"has a storage of {brief(numel)} elements")
    return StorageId(dtype, key, location, numel, pid[5] if len(pid) == 6 else None)


class FirstDtypes:
    """The dtype with which a pickle first refers to each of `count` storages, by the storage's number.

    torch.load creates a storage when it first meets its key, and returns it for every later id with that key, whatever
    dtype the later id states.
    """

    # One byte per storage: there may be a million.
    _CODES: ClassVar[dict[str, int]] = {name: code for code, name in enumerate(DTYPES, 1)}

    def __init__(self, count: int) -> None:
        self._codes = bytearray(count)

    def agreeing(self, dtype: DType) -> Callable[[int], bool]:
        """Return a function: whether this is the first reference to a storage, by its number, or `dtype` is that of the
        first; it remembers it."""
        code, codes = self._CODES[dtype.name], self._codes

        def agrees(number: int) -> bool:
            known = codes[number]
            if not known:
                codes[number] = known = code
            return known == code

        return agrees

    def are_first(self, dtype: DType, start: int, stop: int) -> bool:
        """Whether these are the first references to all of the storages `start` to `stop`; if so, remember `dtype`."""
        if any(self._codes[start:stop]):
            return False
        self._codes[start:stop] = bytes((self._CODES[dtype.name],)) * (stop - start)
        return True


def _in_order(tensor: LazyTensor, storage: Storage) -> LazyTensor:
    """Return `tensor`, a view of `storage`, in little-endian byte order."""
    if not storage.swapped or itemsize_of_components(tensor.dtype) == 1:
        return tensor
    return Convert(tensor, Swap(itemsize_of_components(tensor.dtype)), tensor.dtype)


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
            raise MalformedError("has a tensor whose size or stride is not made of counts")
    numel = math.prod(size)
    if numel >= MAX_BYTES:
        raise MalformedError(f"has a tensor of {brief(numel)} elements")
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
            f"{brief(offset)}, which goes beyond the {size} bytes of its storage {brief(key)}"
        )
    return start


class _Tensors:
    """Rebuilds tensors. Remembers the shapes it has met, so that tensors of one shape share the tuples."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, Any], _Geometry] = {}

    def geometry(self, size: Any, stride: Any) -> _Geometry:
        # Tuples are hashed only if all their elements are plain integers: hashing others could take forever.
        if type(size) is tuple and type(stride) is tuple and len(size) == len(stride) <= MAX_DIMS:
            for number in size:
                if type(number) is not int:
                    break
            else:
                for number in stride:
                    if type(number) is not int:
                        break
                else:
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
            return _unknown("a tensor", storage)
        geometry = self.geometry(size, stride)
        shape, strides = geometry.shape, geometry.strides
        if dtype is None:
            dtype = storage.dtype
        if type(offset) is not int or offset < 0:
            raise MalformedError("has a tensor whose storage offset is not a count")
        if type(requires_grad) is not bool:
            raise MalformedError("has a tensor whose requires_grad is not a bool")
        if requires_grad and not is_differentiable(dtype.name):
            raise MalformedError(f"has a tensor of {dtype} that requires gradients")
        if storage.meta:
            return _meta(TorchConstant("dtype", dtype.name), shape, strides, requires_grad)
        start = _start(dtype, geometry, offset, storage.size, storage.key)
        tensor: LazyTensor = Stored(storage.file, storage.offset + start, dtype, shape, strides)
        if storage.swapped:
            if itemsize_of_components(dtype) != itemsize_of_components(storage.dtype):
                raise MalformedError(
                    f"has a big-endian storage {storage.key[:40]!r} of {storage.dtype} with a tensor of {dtype} in it, "
                    "whose bytes torch.load does not put in order"
                )
            tensor = _in_order(tensor, storage)
        if metadata:
            tensor = _resolved(tensor, metadata)
        facts = TensorFacts("tensor", requires_grad, None, storage.identity, storage.size, offset, strides)
        return Tagged(tensor, facts)

    def phrase(self, phrase: Phrase, places: Places) -> Maker | None:
        """Return a function from keys to the tensors that `rebuild_tensor_v2` makes of the storages with these keys.

        It ends before the first key that it cannot locate. There is no function (None) if `phrase` is another
        call or an invalid one, or if `places` cannot locate its storages.
        """
        if phrase.function != _REBUILD or phrase.hooks != _HOOKS:
            return None
        offset, flag = phrase.offset, phrase.flag
        try:
            wanted = storage_id((phrase.tag, phrase.cls, "0", phrase.location, phrase.numel))
            dtype = wanted.dtype
            nbytes = wanted.numel * dtype.itemsize
            geometry = self.geometry(phrase.size, phrase.stride)
            start = _start(dtype, geometry, offset, nbytes, wanted.key)
        except MalformedError:
            return None
        if flag and not is_differentiable(dtype.name):
            return None
        find = places(wanted)
        if find is None or offset < 0:
            return None
        shape, strides = geometry.shape, geometry.strides
        new = tuple.__new__  # what TensorFacts calls

        def make(keys: Sequence[str]) -> list[Tagged]:
            file, places, identities = find(keys)
            return [
                Tagged(
                    Stored(file, at + start, dtype, shape, strides),
                    new(TensorFacts, ("tensor", flag, None, identity, nbytes, offset, strides)),
                )
                for at, identity in zip(places, identities, strict=True)
            ]

        return make

    # Each of these takes the arguments of torch's function of the same name.

    def rebuild_tensor(self, args: tuple[Any, ...]) -> Any:
        _arguments(args, "_rebuild_tensor", 4)
        return self.view(*args)

    def build_typed(self, value: Opaque, state: Any) -> Any:
        """Set the state (storage, offset, size, stride) of a torch.FloatTensor or the like, until torch 0.1.10."""
        if value.args or value.state or type(state) is not tuple or len(state) != 4:
            raise MalformedError(f"has a {value.name} whose state is not that of a tensor")
        if type(state[0]) is not Storage:
            return _unknown(f"a {value.name}", state[0])
        if state[0].dtype != _TENSOR_DTYPES[value.cls]:
            raise MalformedError(f"has a {value.name} in a storage of {state[0].dtype}")
        return self.view(*state)

    def rebuild_tensor_v2(self, args: tuple[Any, ...]) -> Any:
        _arguments(args, "_rebuild_tensor_v2", 6, 7)
        storage, offset, size, stride, requires_grad, _hooks, *metadata = args
        return self.view(storage, offset, size, stride, requires_grad, None, *metadata)

    def rebuild_tensor_v3(self, args: tuple[Any, ...]) -> Any:
        _arguments(args, "_rebuild_tensor_v3", 7, 8)
        storage, offset, size, stride, requires_grad, _hooks, dtype, *metadata = args
        return self.view(storage, offset, size, stride, requires_grad, _dtype(dtype), *metadata)

    def rebuild_qtensor(self, args: tuple[Any, ...]) -> Any:
        """Take seven arguments, one of them the quantizer; or eight, as torch 1.1 and 1.2 split it into two."""
        _arguments(args, "_rebuild_qtensor", 7, 8)
        if len(args) == 8:
            args = (*args[:4], (TorchConstant("qscheme", "per_tensor_affine"), *args[4:6]), *args[6:])
        storage, offset, size, stride, quantizer, requires_grad, _hooks = args
        if type(storage) is not Storage:
            return _unknown("a quantized tensor", storage)
        packed: dict[str, Any] = {}
        if storage.dtype.name in PACKED:
            # Several values share a byte: take the bytes as they are.
            shape, strides, _, extent = self.geometry(size, stride)
            if offset != 0 or extent > storage.size * PACKED[storage.dtype.name]:
                raise MalformedError("has a quantized tensor that goes beyond its storage")
            packed = {"shape": Size(shape), "strides": strides}
            size, stride = (storage.size,), (1,)
        if type(quantizer) is not tuple or not 3 <= len(quantizer) <= 4:
            raise MalformedError("has a quantized tensor whose quantizer is not a tuple of its parameters")
        values = self.view(storage, offset, size, stride)
        if type(values) is not Tagged:
            return values  # on the meta device, without data
        if type(requires_grad) is not bool or requires_grad:
            raise MalformedError("has a quantized tensor that requires gradients")
        names = ("qscheme", *QUANTIZERS[len(quantizer) - 3])
        return _composite("quantized", {"values": values, **dict(zip(names, quantizer, strict=True)), **packed})

    def rebuild_meta_tensor(self, args: tuple[Any, ...]) -> Any:
        _arguments(args, "_rebuild_meta_tensor_no_storage", 4)
        shape, strides, *_ = self.geometry(args[1], args[2])
        return _meta(args[0], shape, strides, args[3])

    def rebuild_wrapper_subclass(self, args: tuple[Any, ...]) -> Any:
        _arguments(args, "_rebuild_wrapper_subclass", 8)
        cls, dtype, size, stride, offset, layout, device, requires_grad = args
        if type(cls) is not Global:
            return _unknown("a tensor of a class", cls)
        self.geometry(size, stride)
        if type(offset) is not int or type(requires_grad) is not bool:
            raise MalformedError(f"has a tensor of {str(cls)[:100]} whose arguments are of the wrong types")
        for constant, kind in ((dtype, "dtype"), (layout, "layout")):
            if type(constant) is not TorchConstant or constant.kind != kind:
                raise MalformedError(f"has a tensor of {str(cls)[:100]} whose {kind} is none")
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


def _arguments(args: tuple[Any, ...], name: str, *counts: int) -> None:
    """Raise MalformedError unless the number of arguments is one that some release of torch passes to `name`."""
    if len(args) not in counts:
        raise MalformedError(f"calls {name} with {len(args)} arguments; it takes {' or '.join(map(str, counts))}")


def _unknown(what: str, value: Any) -> Any:
    """Return NotImplemented if `value`, which `what` is made of, is Opaque: the call then becomes an `Opaque` too.

    Raises MalformedError for any other value: `what` cannot be made of it.
    """
    if type(value) is Opaque:
        return NotImplemented
    raise MalformedError(f"makes {what} of a value of type {type(value).__name__}")


def _composite(kind: str, parts: dict[str, Any]) -> Any:
    """Return a tensor made of `parts`; NotImplemented if one is Opaque. Raises MalformedError if they do not fit."""
    for part in parts.values():
        if type(part) is Opaque:
            return NotImplemented
    fault = composite_fault(kind, parts)
    if fault:
        raise MalformedError(f"has a {kind} tensor with {fault}")
    return Composite(kind, parts)


def _dtype(value: Any) -> DType:
    if type(value) is not TorchConstant or value.kind != "dtype":
        raise MalformedError("has a tensor whose dtype is not a dtype")
    if value.name not in DTYPES:
        raise RefusedError(f"has a tensor of dtype torch.{value.name}, which is not known")
    return DTYPES[value.name]


def _meta(dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool) -> Any:
    return _composite(
        "meta", {"dtype": dtype, "shape": Size(shape), "strides": strides, "requires_grad": requires_grad}
    )


def _resolved(tensor: LazyTensor, metadata: Any) -> LazyTensor:
    """Apply torch's lazy conjugate and negation, the flags in `metadata`, to `tensor`."""
    if type(metadata) is not dict:
        raise MalformedError("has a tensor whose metadata is not a dictionary")
    for name, value in metadata.items():
        if type(name) is not str:
            raise MalformedError("has a tensor whose metadata has names that are not text")
        if name not in ("conj", "neg"):
            raise RefusedError(f"has a tensor with metadata {brief(name)}, which is not known")
        # torch takes a flag that is present as set, whatever its value.
        if value is not True:
            raise MalformedError(f"has a tensor whose {name} flag is not True")
    dtype = tensor.dtype
    if "conj" in metadata:
        if dtype.kind != "c":
            raise MalformedError(f"has a conjugate tensor of {dtype}")
        tensor = Convert(tensor, Conjugate(dtype.name), dtype)
    if "neg" in metadata:
        if dtype.kind not in "fc":
            raise MalformedError(f"has a tensor of {dtype} with the neg flag")
        tensor = Convert(tensor, Negate(dtype.name), dtype)
    return tensor


_KINDS = {
    Global("torch", "Tensor"): "tensor",
    Global("torch._tensor", "Tensor"): "tensor",
    Global("torch.nn.parameter", "Parameter"): "parameter",
    Global("torch.nn.parameter", "Buffer"): "buffer",
}


def _described(leaf: Any, kind: str, requires_grad: bool | None, attributes: Any) -> Any:
    """Return `leaf` as a tensor of `kind` with `attributes`. `requires_grad` None keeps that of `leaf`."""
    fault = attributes_fault(kind, attributes)
    if fault:
        raise MalformedError(f"has a tensor with {fault}")
    if type(leaf) is Composite:
        parts = dict(leaf.parts)
        if requires_grad is not None:
            parts["requires_grad"] = requires_grad
        if attributes:
            parts["attributes"] = attributes
        if leaf.kind == "meta" and attributes and kind not in _KINDS.values():
            # A class that wraps others, which are its attributes, and says that it is on no device.
            more = {"storage_offset": 0, "layout": TorchConstant("layout", "strided")}
            parts |= {**more, "device": TorchConstant("device", "meta")}
            return Composite(kind, parts)
        if kind not in ("tensor", leaf.kind):
            parts["class"] = kind
        return Composite(leaf.kind, parts)
    if type(leaf) is not Tagged:
        return _unknown(f"a {kind[:100]}", leaf)
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
    _arguments(args, "_rebuild_parameter", 3, 4)
    if type(args[1]) is not bool:
        raise MalformedError("has a parameter whose requires_grad is not a bool")
    return _described(args[0], "parameter", args[1], args[3] if len(args) == 4 else None)


def _made_without_state(cls: Global) -> Constructor:
    """Return a constructor for a tensor, Variable or Parameter of torch before 0.4; its BUILD completes it."""
    return lambda args: Opaque(cls, args)


def _build_variable(value: Opaque, state: Any) -> Any:
    """Set the state of a Variable or Parameter of torch before 0.4, as torch.Tensor.__setstate__ does.

    The state is (requires_grad, volatile, hooks) if it was constructed from its tensor. Until torch 0.1.9, if it was
    constructed from nothing, it is (tensor, gradient, hooks, requires_grad, volatile); torch ignores the gradient.
    """
    if type(state) is tuple and len(state) == 5 and not value.args:
        data, _, _, requires_grad, _ = state
    elif type(state) is tuple and len(state) == 3 and len(value.args) == 1:
        (data,), (requires_grad, _, _) = value.args, state
    else:
        raise MalformedError(f"has a {value.name} whose state is not that of one")
    if type(requires_grad) is not bool:
        raise MalformedError(f"has a {value.name} whose requires_grad is not a bool")
    return _described(data, _KINDS.get(value.cls, "tensor"), requires_grad, None)


def _rebuild_from_type(args: tuple[Any, ...], rebuild: dict[Global, Constructor]) -> Any:
    """Take (function, class, arguments of the function, state)."""
    _arguments(args, "_rebuild_from_type", 4)
    function, cls, inner, state = args
    if type(cls) is not Global:
        return _unknown("a tensor of a class", cls)
    construct = rebuild.get(function) if type(function) is Global else None
    if construct is None:
        # A function of the user's own, or one that a call returned.
        return NotImplemented if type(function) is Global else _unknown("a tensor by a function", function)
    if type(inner) is not tuple:
        raise MalformedError(f"has a tensor of {str(cls)[:100]} whose arguments are not a tuple")
    leaf = construct(inner)
    if leaf is NotImplemented:
        return NotImplemented
    kind = _KINDS.get(cls, str(cls))
    if kind == "tensor" and type(state) is dict and state.get("_is_buffer") is True:
        kind = "buffer"  # nn.Buffer makes a plain tensor with this attribute
    return _described(leaf, kind, None, state)


def _rebuild_sparse_tensor(args: tuple[Any, ...]) -> Any:
    """Take (layout, (indices, values, size[, coalesced])) or (layout, (compressed indices, indices, values, size))."""
    _arguments(args, "_rebuild_sparse_tensor", 2)
    layout, data = args
    known = type(layout) is TorchConstant and layout.kind == "layout" and layout.name in SPARSE
    if not known or type(data) is not tuple:
        raise MalformedError("has a sparse tensor without a layout or parts")
    names = COMPOSITES[layout.name]
    if layout.name == "sparse_coo" and len(data) > len(names):
        names = (*names, "is_coalesced")
    if len(data) != len(names):
        raise MalformedError(f"has a {layout.name} tensor of {len(data)} parts")
    return _composite(layout.name, dict(zip(names, data, strict=True)))


def _rebuild_nested_tensor(args: tuple[Any, ...]) -> Any:
    _arguments(args, "_rebuild_nested_tensor", 4)
    return _composite("nested", dict(zip(COMPOSITES["nested"], args, strict=True)))


def _rebuild_device_tensor(args: tuple[Any, ...]) -> Any:
    """Take (data, dtype, device, requires_grad). `data` is a tensor or numpy array: such a device has no storages."""
    _arguments(args, "_rebuild_device_tensor", 4)
    data, dtype, _device, requires_grad = args
    if type(requires_grad) is not bool:
        raise MalformedError("has a tensor whose requires_grad is not a bool")
    target = _dtype(dtype)
    if type(data) is NumpyArray:
        tensor = _from_numpy(data)
    elif type(data) is Tagged:
        tensor = data.tensor
    else:
        return _unknown("a tensor", data)
    if tensor.dtype != target:
        # torch converts bfloat16 to float32 for numpy.
        if (tensor.dtype.name, target.name) != ("float32", "bfloat16"):
            raise MalformedError(f"has a tensor of {target} whose elements are of {tensor.dtype}")
        tensor = Convert(tensor, Cast(tensor.dtype.name, target.name), target)
    facts = data.facts if type(data) is Tagged else TensorFacts()
    return _described(Tagged(tensor, facts), "tensor", requires_grad, None)


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
        raise MalformedError("has a torch.Size that is not made of integers")
    return Size(counts)


def _device(args: tuple[Any, ...]) -> Any:
    # The index is part of the name, or a second argument.
    indices = [index for index in args[1:2] if type(index) is int and index.bit_length() < 16]
    sound = 1 <= len(args) == 1 + len(indices) and type(args[0]) is str
    made = TorchConstant("device", ":".join(map(str, args))) if sound else None
    if not made or not torch_constants.has(made):
        raise MalformedError("has a torch.device that is none")
    return made


def _layout(args: tuple[Any, ...]) -> Any:
    """Take the name of a layout, such as ("torch.strided",)."""
    named = args[0].removeprefix("torch.") if len(args) == 1 and type(args[0]) is str else ""
    constant = CONSTANTS.get(("torch", named))
    if constant is None or constant.kind != "layout":
        raise MalformedError(f"has a layout {named[:40]!r}, which torch lacks")
    return constant


# ------------------------------------------------------------------------------------------------------------ numpy

_NUMPY_DTYPE_CLASS, _NUMPY_ARRAY_CLASS = Global("numpy", "dtype"), Global("numpy", "ndarray")
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_TORCH_OF_NUMPY = {
    "b1": "bool",
    **{f"{kind}{size}": f"{name}{8 * size}" for kind, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    "c8": "complex64",
    "c16": "complex128",
}


def _made_dtype(args: tuple[Any, ...]) -> Opaque:
    """Return the value of numpy.dtype("f8", align, copy), which its BUILD completes."""
    named = args[0] if 1 <= len(args) <= 3 else None
    if type(named) not in (str, Global, Opaque) or any(type(flag) not in (bool, int) for flag in args[1:]):
        raise MalformedError("has a numpy.dtype that is none")
    if type(named) is str and numpy_dtypes.is_lacking(named):
        raise MalformedError(f"has a numpy.dtype {named!r}, which numpy lacks")
    return Opaque(Global("numpy", "dtype"), args)


def _made_array(cls: Global) -> Constructor:
    """Return a constructor that takes (class, shape, element type) and gives an array that its BUILD completes."""

    def construct(args: tuple[Any, ...]) -> Opaque:
        if len(args) != 3 or type(args[0]) not in (Global, Opaque):
            raise MalformedError("has a numpy array that is made of nothing that one is made of")
        return Opaque(cls, args)

    return construct


def numpy_dtype(value: Any) -> tuple[str, int] | None:
    """Return a dtype of plain elements in numpy's notation, such as "<f8", and its element size in bytes; else None.

    `value` is what the pickle made of numpy.dtype("f8", align, copy) and its state (version, byte order, subdtype,
    names, fields, size, alignment, flags; for dates and times also the unit). Raises MalformedError for a value that is
    no dtype, and for a dtype whose statements contradict each other.
    """
    if type(value) is not Opaque:
        raise MalformedError("has a numpy value whose dtype is none")
    if value.cls != _NUMPY_DTYPE_CLASS or not value.args or type(value.args[0]) is not str:
        return None
    named = numpy_dtypes.parsed(value.args[0])
    if not named:
        return None
    order, kind, size = named.order, named.kind, named.itemsize
    if value.state:
        state = value.state[-1]
        if type(state) is not tuple:
            raise MalformedError("has a numpy.dtype whose state is not a tuple")
        if len(state) < 8 or any(part is not None for part in state[2:5]):
            return None
        order = state[1]
        # numpy takes the size of kinds S, U and V from the state. Only what has no byte order says "|".
        orders = ("<", ">", "=", *("|" if kind in "SV" or size == 1 else ()))
        if type(order) is not str or order not in orders or (kind in "SUV" and state[5] != size):
            raise MalformedError(f"has a numpy.dtype {value.args[0]!r} with a state that does not fit it")
        # Without `copy`, the state changes nothing: numpy has one shared object for such a dtype.
        if ">" in (order, named.order) and order != named.order and not (len(value.args) == 3 and value.args[2]):
            raise MalformedError(f"has a numpy.dtype {value.args[0]!r} whose byte order is said twice, and differs")
        if kind in "mM":
            counted = _unit(state[8:])
            if counted is None:
                return None
            named = named._replace(multiple=counted[0], unit=counted[1])
    if kind in "SV" or size == 1:
        order = "|"
    elif order != ">":
        order = "<"
    return str(named._replace(order=order)), size


def _unit(state: tuple[Any, ...]) -> tuple[int, str] | None:
    """Return what dates or times count, such as (25, "s"); (1, "") for the generic unit, None for an unknown one.

    `state` is ((metadata, (unit, multiple, divisor, event)),).
    """
    metadata, counted = state[0] if len(state) == 1 and type(state[0]) is tuple and len(state[0]) == 2 else (1, ())
    if metadata or type(counted) is not tuple or len(counted) != 4 or counted[2:] != (1, 1):
        return None
    name, count = counted[:2]
    name = str(name, "ascii", "replace") if type(name) is bytes else name
    if type(name) is not str or type(count) is not int or not 1 <= count <= numpy_dtypes.MOST_COUNT:
        return None
    if name == "generic":
        return 1, ""
    return (count, name) if name in numpy_dtypes.UNITS else None


def _raw(data: Any, nbytes: int) -> bytes | None:
    """Return the bytes of an array, `nbytes` long, else None. Python 2 pickles a str, which may have become text."""
    if type(data) is str:
        data = data.encode("utf-8", "surrogatepass")
    return bytes(data) if type(data) in (bytes, bytearray) and len(data) == nbytes else None


def _array(shape: Any, dtype: Any, order: str, data: Any) -> Any:
    plain = numpy_dtype(dtype)
    if type(shape) is not tuple or len(shape) > MAX_DIMS:
        raise MalformedError("has a numpy array whose shape is none")
    if any(type(count) is not int or not 0 <= count < MAX_BYTES for count in shape):
        raise MalformedError("has a numpy array whose shape is not made of counts")
    if plain is None:
        return NotImplemented
    raw = _raw(data, math.prod(shape) * plain[1])
    if raw is None:
        found = f"{len(data)} bytes" if type(data) in (bytes, bytearray, str) else f"a {type(data).__name__}"
        raise MalformedError(f"has a numpy array of shape {brief(shape)} with {found} for its elements")
    return NumpyArray(plain[0], shape, order, raw)


def _build_array(value: Opaque, state: Any) -> Any:
    """Set the state of an array: (version, shape, dtype, is Fortran-ordered, data). numpy's oldest has no version."""
    if type(value.args) is not tuple or value.args[:1] != (_NUMPY_ARRAY_CLASS,) or value.state:
        return NotImplemented
    if type(state) is tuple and len(state) == 4:
        state = (0, *state)
    sound = type(state) is tuple and len(state) == 5 and type(state[0]) is int and state[0] in (0, 1)
    if not sound or type(state[3]) not in (bool, int):
        raise MalformedError("has a numpy array whose state is not that of one")
    array = _array(state[1], state[2], "F" if state[3] else "C", state[4])
    return _native(array) if type(array) is NumpyArray and array.dtype[0] == ">" else array


def _native(array: NumpyArray) -> NumpyArray:
    """Convert a big-endian array to little-endian, as numpy does when it sets the array's state."""
    kind, size = array.dtype[1], int(re.match("[0-9]+", array.dtype[2:])[0])  # type: ignore[index]
    unit = 4 if kind == "U" else size // 2 if kind == "c" else size
    data = bytearray(len(array.data))
    for at in range(unit):
        data[at::unit] = array.data[unit - 1 - at :: unit]
    return NumpyArray(f"<{array.dtype[1:]}", array.shape, array.order, bytes(data))


def _frombuffer(args: tuple[Any, ...]) -> Any:
    """Take (data, dtype, shape, order), as protocol 5 pickles an array."""
    if len(args) != 4 or args[3] not in ("C", "F"):
        raise MalformedError("has a numpy array that is made of nothing that one is made of")
    return _array(args[2], args[1], args[3], args[0])


def _scalar(args: tuple[Any, ...]) -> Any:
    """Take (dtype, data)."""
    if len(args) != 2:
        raise MalformedError("has a numpy scalar that is made of nothing that one is made of")
    plain = numpy_dtype(args[0])
    if plain is None:
        return NotImplemented
    raw = _raw(args[1], plain[1])
    if raw is None:
        raise MalformedError(f"has a numpy scalar of {plain[0]} that does not have {plain[1]} bytes")
    return NumpyScalar(plain[0], raw)


def _from_numpy(array: NumpyArray) -> LazyTensor:
    """Return the array as a tensor. Raises MalformedError if torch lacks its dtype."""
    name = _TORCH_OF_NUMPY.get(array.dtype[1:])
    if name is None:
        raise MalformedError(f"has a tensor made of a numpy array of {array.dtype[:40]}")
    dtype = DTYPES[name]
    data = array.data
    if array.order == "F" and sum(count > 1 for count in array.shape) > 1:
        import numpy as np

        data = np.frombuffer(data, f"V{dtype.itemsize}").reshape(array.shape, order="F").tobytes()
    tensor: LazyTensor = Inline(data, dtype, array.shape)
    unit = itemsize_of_components(dtype)
    return Convert(tensor, Swap(unit), dtype) if array.dtype[0] == ">" and unit > 1 else tensor


# ------------------------------------------------------------------------------------------------------- vocabulary


# Those of the functions in torch._utils that remember no shapes.
_REBUILDING: dict[Global, Constructor] = {
    Global("torch._utils", name): made
    for name, made in {
        "_rebuild_parameter": _rebuild_parameter,
        "_rebuild_parameter_with_state": _rebuild_parameter,
        "_rebuild_sparse_tensor": _rebuild_sparse_tensor,
        "_rebuild_sparse_csr_tensor": _rebuild_sparse_tensor,
        "_rebuild_nested_tensor": _rebuild_nested_tensor,
        "_rebuild_device_tensor_from_cpu_tensor": _rebuild_device_tensor,
        "_rebuild_device_tensor_from_numpy": _rebuild_device_tensor,
        "_rebuild_xla_tensor": _rebuild_device_tensor,
    }.items()
}
_CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("numpy", "dtype"): _made_dtype,
    **{(cls.module, cls.name): _made_without_state(cls) for cls in (*_TENSOR_DTYPES, *_VARIABLES)},
    **{(module, "_reconstruct"): _made_array(Global(module, "_reconstruct")) for module in _NUMPY_MODULES},
    **{(module, "scalar"): _scalar for module in _NUMPY_MODULES},
    **{(module.replace("multiarray", "numeric"), "_frombuffer"): _frombuffer for module in _NUMPY_MODULES},
}
_BUILDERS: dict[tuple[str, str], Builder] = {
    **{(cls.module, cls.name): _build_variable for cls in _VARIABLES},
    **{(module, "_reconstruct"): _build_array for module in _NUMPY_MODULES},
}


def vocabulary(storage: Callable[[Any], Any], places: Places | None = None) -> Vocabulary:
    """Return the vocabulary that reads all that torch writes as data.

    `storage` resolves a persistent id, usually with `storage_id`; `places` resolves many alike at once. Tensors become
    `Tagged` leaves whose facts name the storage by its identity. Tensors made of several (sparse, quantized, nested,
    of a wrapper subclass) or without data (meta) become `Composite`s.
    """
    tensors = _Tensors()
    rebuild: dict[Global, Constructor] = {
        **_REBUILDING,
        Global("torch._utils", "_rebuild_tensor"): tensors.rebuild_tensor,
        Global("torch._utils", "_rebuild_tensor_v2"): tensors.rebuild_tensor_v2,
        Global("torch._utils", "_rebuild_tensor_v3"): tensors.rebuild_tensor_v3,
        Global("torch._utils", "_rebuild_qtensor"): tensors.rebuild_qtensor,
        Global("torch._utils", "_rebuild_meta_tensor_no_storage"): tensors.rebuild_meta_tensor,
        Global("torch._utils", "_rebuild_wrapper_subclass"): tensors.rebuild_wrapper_subclass,
    }

    def from_type(args: tuple[Any, ...]) -> Any:
        return _rebuild_from_type(args, rebuild)

    constructors: dict[tuple[str, str], Constructor] = {
        **_CONSTRUCTORS,
        **{(function.module, function.name): made for function, made in rebuild.items()},
        ("torch._tensor", "_rebuild_from_type_v2"): from_type,
        ("torch._tensor", "_rebuild_from_type"): from_type,
        ("torch.tensor", "_rebuild_from_type"): from_type,
    }
    builders = {**_BUILDERS, **{(cls.module, cls.name): tensors.build_typed for cls in _TENSOR_DTYPES}}
    phrases = functools.partial(TensorPhrases, functools.partial(tensors.phrase, places=places)) if places else None
    return Vocabulary(constructors, CONSTANTS, builders, storage, phrases)


@functools.cache
def without_tensors() -> Vocabulary:
    """Return the vocabulary for pickles of which only names and calls matter: tensors in them are not made."""
    words = vocabulary(lambda pid: None)
    constructors = {
        name: made
        for name, made in words.constructors.items()
        if name[0] != "torch._utils" and not name[1].startswith("_rebuild_from_type")
    }
    return words._replace(constructors=constructors, persistent=None)
