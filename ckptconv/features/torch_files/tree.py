"""Convert a tree to a `.pt` file: a pickle that rebuilds tensors with torch's own functions, and its storages.

Source: `torch/_utils.py`, `torch/_tensor.py` and `torch/storage.py`. The output is the same as torch.save's.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsafeError, UnsupportedError
from ckptconv.features.torch_files import writable
from ckptconv.features.torch_files.storage import Placed, overlaps, storage_of, strides_of
from ckptconv.features.torch_files.torch_zip import file_plan
from ckptconv.features.torch_files.writer import Call, PersistentId, dumps
from ckptconv.pickles.children import walk
from ckptconv.pickles.nodes import COMPOSITES, QUANTIZERS, WRAPPER, Composite, Global, Opaque, TorchConstant
from ckptconv.plan import FilePlan
from ckptconv.structure.leaves import is_dense
from ckptconv.structure.soundness import composite_fault
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Tagged, TensorFacts, View, facts_of, untagged
from ckptconv.tensors.strides import contiguous_strides

# A storage is written whole if its views cover half of it, or it is small; else only the range of its views. If that
# range is larger than this many times the bytes of the views, they get separate storages.
_SPARSE = 64
_SMALL = 1 << 20


# Quantized dtypes of integers: by the integers' dtype, and by whether one (0), two (1) or four (2) values share a byte.
_QUANTIZED_AS = {
    ("uint8", 0): "quint8", ("uint8", 1): "quint4x2", ("uint8", 2): "quint2x4",
    ("int8", 0): "qint8", ("int32", 0): "qint32",
}  # fmt: skip
_REBUILDING = {"nested": "_rebuild_nested_tensor", "meta": "_rebuild_meta_tensor_no_storage"}
# Kinds of tensors that have no class of their own; a buffer is a tensor with an attribute. STORAGE is the kind of a
# storage that is itself a leaf of the tree.
PLAIN_KINDS = frozenset({"tensor", "buffer"})
STORAGE = "storage"

# The classes of typed storages; tensors of other dtypes use untyped ones.
_CLASSES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex128": "ComplexDouble",
    "complex64": "ComplexFloat",
    "quint8": "QUInt8",
    "qint8": "QInt8",
    "qint32": "QInt32",
    "quint4x2": "QUInt4x2",
    "quint2x4": "QUInt2x4",
}
_DTYPES = {cls: dtype for dtype, cls in _CLASSES.items()}


def plan_tree(name: str, tree: Any, stem: str = "archive") -> FilePlan:
    """Plan the archive `name` of `tree`, as `TorchTree` does."""
    return TorchTree(tree).plan(name, stem)


@functools.cache
def _utils(name: str) -> Global:
    return Global("torch._utils", name)


@dataclass(eq=False, repr=False, slots=True)
class _Room:
    """A storage as it is written: number in the archive, first byte in the original storage, size, and class.

    `cls` is None, for an untyped storage, if its views have several dtypes or one without a storage class.
    """

    number: int
    start: int
    nbytes: int
    cls: str | None
    views: list[Placed] = field(default_factory=list)


def _may_overlap(views: list[Placed]) -> bool:
    return len(views) > 1 or not is_dense(views[0].tensor.shape, views[0].strides)


class TorchTree:
    """A tree on its way into an archive. Tensors that shared a storage share it again.

    Objects of classes that are not known to be data are written only if `opaque` is "keep", and only if `scan` would
    call the file safe. If it is "drop", a tensor of such a subclass becomes one of torch's own class. Raises
    UnsafeError for other objects, as loading the file would run the code that they name.
    """

    def __init__(self, tree: Any, opaque: str = "") -> None:
        self._opaque = opaque
        self._rooms: list[_Room] = []
        self._shared: dict[Hashable, _Room | None] = {}
        self.tensors = 0
        self._arrange(tree)
        self._description = dumps(tree, self._reduce)
        name = writable.unreviewed(self._description) if opaque == "keep" else ""
        if name:
            raise UnsafeError(
                f"The file would contain {name}, which is not on the list of reviewed calls with these arguments. "
                "Loading the file would run this code, so the file is not written.",
                "Use --opaque drop to write everything else, or leave this value out with --exclude.",
            )
        self._contents = [storage_of(room.views, room.nbytes) for room in self._rooms]
        # Of a million storages only few may have overlapping views: the others need no second look.
        self._overlapping = [room.views for room in self._rooms if _may_overlap(room.views)]
        self._rooms.clear()

    def plan(self, name: str, stem: str = "archive") -> FilePlan:
        """Plan the archive. `stem` is the directory in it."""
        return file_plan(name, self._description, self._contents, stem)

    def overlaps(self) -> Iterator[tuple[LazyTensor, LazyTensor]]:
        """Yield pairs of tensors that are equal unless views of one storage have changed since they were saved."""
        for views in self._overlapping:
            yield from overlaps(views)

    def _arrange(self, tree: Any) -> None:
        """Find which tensors share a storage, and which bytes of it must be written."""
        shared: dict[Hashable, list[Tagged]] = {}
        for node in walk(tree):
            if isinstance(node, LazyTensor):
                self.tensors += 1
                facts = facts_of(node)
                self._check_kind(facts.kind)
                if isinstance(node, Tagged) and facts.storage is not None and node.numel:
                    shared.setdefault(facts.storage, []).append(node)
            elif isinstance(node, (Composite, Global, Opaque)):
                self._check(node)
        for storage, leaves in shared.items():
            self._shared[storage] = self._room_of(leaves)

    def _check(self, node: Any) -> None:
        """Raise UnsafeError for a class or function that must not be written, CorruptError for inconsistent parts."""
        cls = writable.unlisted(node)
        if cls and self._opaque != "keep":
            raise _unsafe(cls)
        if isinstance(node, Composite):
            fault = composite_fault(node.kind, node.parts)
            if fault:
                raise CorruptError(f"A {node.kind} tensor has {fault}: its record is not valid.")
            self._check_kind(node.parts.get("class", "tensor"))

    def _check_kind(self, kind: str) -> None:
        """Raise UnsafeError for a subclass of tensors that must not be written."""
        if not self._opaque and kind not in writable.KINDS and writable.is_unlisted_kind(kind):
            raise _unsafe(kind)

    def _written_kind(self, kind: str) -> str:
        """Return the class with which a tensor of `kind` is written."""
        plain = kind in PLAIN_KINDS or (self._opaque == "drop" and writable.is_unlisted_kind(kind))
        return "torch.Tensor" if plain else kind

    @staticmethod
    def _room_of(leaves: list[Tagged]) -> _Room | None:
        """Decide which bytes of the storage of `leaves` to write; None if each leaf is to have its own storage."""
        spans = [Placed(leaf, leaf.facts.storage_offset, strides_of(leaf, leaf.facts.strides)).span for leaf in leaves]
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        shown = sum(min(leaf.nbytes, high - low) for leaf, (low, high) in zip(leaves, spans, strict=True))
        nbytes = leaves[0].facts.storage_nbytes
        if nbytes <= 2 * shown + _SMALL:
            low, high = 0, max(nbytes, high)
        low -= low % 64  # a multiple of every element size
        if high - low > _SPARSE * shown + _SMALL:
            return None
        dtypes = {leaf.dtype for leaf in leaves}
        cls = _CLASSES.get(leaves[0].dtype.name) if len(dtypes) == 1 else None
        if cls is not None:
            high -= (high - low) % leaves[0].dtype.itemsize  # less than an element: in no view
        return _Room(-1, low, high - low, cls)

    # -- values that are not Python's own

    def _reduce(self, value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return self._leaf(value)
        if isinstance(value, Composite):
            return self._composite(value)
        if isinstance(value, Opaque):
            return self._object(value)
        return None

    @staticmethod
    def _object(value: Opaque) -> Call:
        """Return the call that constructs an object, as in the pickle it came from."""
        if value.call == "persistent" or not isinstance(value.args, tuple):
            raise UnsupportedError(f"An object of {value.name} is stored outside its pickle, and cannot be written.")
        function, args = value.cls, value.args
        if value.call == "newobj":
            function, args = Global("copy_reg", "__newobj__"), (value.cls, *args)
        elif value.call == "newobj_ex":
            function, args = Global("copy_reg", "__newobj_ex__"), (value.cls, args, dict(value.kwargs or {}))
        return Call(function, args, tuple(value.state), value.appended, value.items)

    def _leaf(self, leaf: LazyTensor) -> Call | PersistentId:
        """Return the call that rebuilds a tensor, parameter or subclass with its attributes; or the id of a storage."""
        facts = facts_of(leaf)
        if facts.kind == STORAGE:
            return self._storage(leaf, facts)
        parameter = facts.kind == "parameter"
        call = self._tensor(leaf, facts, facts.requires_grad and not parameter)
        if parameter:
            return _parameter(call, facts.requires_grad, facts.attributes)
        return _described(call, self._written_kind(facts.kind), facts.attributes)

    def _storage(self, leaf: LazyTensor, facts: TensorFacts) -> PersistentId:
        """Return the id of a storage that is a leaf. torch loads it with the dtype of its class."""
        room, offset, _ = self.place(leaf, facts)
        cls = room.cls or "Byte"  # torch loads an untyped storage as bytes
        if offset or room.nbytes != leaf.nbytes or cls != _CLASSES.get(leaf.dtype.name):
            raise UnsupportedError(
                f"A storage of {leaf.nbytes} bytes of {leaf.dtype} is shared with tensors that have other dtypes or "
                "extend beyond it, which torch files do not support.",
                "Leave it out with --exclude.",
            )
        return _persistent(room)

    def _tensor(self, leaf: LazyTensor, facts: TensorFacts, requires_grad: bool) -> Call:
        room, offset, strides = self.place(leaf, facts)
        arguments: tuple[Any, ...] = (
            _persistent(room),
            offset,
            tuple(leaf.shape),
            strides,
            requires_grad,
            OrderedDict(),
        )
        if room.cls is not None:
            return Call(_utils("_rebuild_tensor_v2"), arguments)
        return Call(_utils("_rebuild_tensor_v3"), (*arguments, TorchConstant("dtype", leaf.dtype.name)))

    def place(self, leaf: LazyTensor, facts: TensorFacts) -> tuple[_Room, int, tuple[int, ...]]:
        """Return the storage of a tensor, the element of it at which the tensor begins, and the tensor's strides."""
        strides = strides_of(leaf, facts.strides)
        room = self._shared.get(facts.storage) if facts.storage is not None and leaf.numel else None
        offset = 0
        if room is not None:
            offset = facts.storage_offset - room.start // leaf.dtype.itemsize
            if room.number < 0:
                room.number = len(self._rooms)
                self._rooms.append(room)
        else:
            if not is_dense(leaf.shape, strides):
                strides = contiguous_strides(leaf.shape)
            room = _Room(len(self._rooms), 0, leaf.nbytes, _CLASSES.get(leaf.dtype.name))
            self._rooms.append(room)
        room.views.append(Placed(untagged(leaf), offset, strides))
        return room, offset, strides

    def _composite(self, value: Composite) -> Call:
        """Return the call that rebuilds a composite tensor."""
        parts = value.parts
        if value.kind not in COMPOSITES:
            return _wrapper(value)
        if value.kind == "quantized":
            call = self._quantized(parts)
        else:
            arguments = tuple(parts[name] for name in COMPOSITES[value.kind])
            if value.kind == "meta":
                arguments = (*arguments, parts.get("requires_grad", False))
            if value.kind.startswith("sparse_"):
                more = tuple(parts[name] for name in ("is_coalesced",) if name in parts)
                arguments = (TorchConstant("layout", value.kind), (*arguments, *more))
            call = Call(_utils(_REBUILDING.get(value.kind, "_rebuild_sparse_tensor")), arguments)
        if parts.get("class") == "parameter":
            return _parameter(call, bool(parts.get("requires_grad")), parts.get("attributes"))
        return _described(call, self._written_kind(parts.get("class", "tensor")), parts.get("attributes"))

    def _quantized(self, parts: Mapping[str, Any]) -> Call:
        values = parts["values"]
        if not isinstance(values, LazyTensor):
            raise UnsupportedError("A quantized tensor without data cannot be written for torch.")
        names = QUANTIZERS["scale" not in parts]
        facts = facts_of(values)
        packed = math.prod(parts.get("shape", values.shape)) / max(values.numel, 1)
        bits = _QUANTIZED_AS.get((values.dtype.name, 2 if packed > 2 else 1 if packed > 1 else 0))
        if bits:  # taken from a tensor in memory, as integers
            values, facts = View(untagged(values), DTYPES[bits], tuple(values.shape)), facts._replace(storage=None)
        room, offset, strides = self.place(values, facts)
        quantizer = (parts["qscheme"], *(parts[name] for name in names))
        # Values smaller than a byte are stored as a flat tensor of their bytes.
        shape, strides = parts.get("shape", values.shape), parts.get("strides", strides)
        shape = tuple(shape) if isinstance(shape, tuple) else shape
        arguments: tuple[Any, ...] = (_persistent(room), offset, shape, strides, quantizer)
        return Call(_utils("_rebuild_qtensor"), (*arguments, facts.requires_grad, OrderedDict()))


def _persistent(room: _Room) -> PersistentId:
    cls, item = _storage_class(room.cls)
    return PersistentId("storage", cls, str(room.number), "cpu", room.nbytes // item)


@functools.cache
def _storage_class(cls: str | None) -> tuple[Global, int]:
    """Return the class of a storage, and the bytes of its elements."""
    if cls is None:
        return Global("torch.storage", "UntypedStorage"), 1
    return Global("torch", f"{cls}Storage"), DTYPES[_DTYPES[cls]].itemsize


def _parameter(call: Call, requires_grad: bool, attributes: Any) -> Call:
    arguments: tuple[Any, ...] = (call, requires_grad, OrderedDict())
    if attributes:
        return Call(_utils("_rebuild_parameter_with_state"), (*arguments, attributes))
    return Call(_utils("_rebuild_parameter"), arguments)


def _unsafe(cls: str) -> UnsafeError:
    return UnsafeError(f"{cls[:200]} is known only by name. Loading a file with it would run it, so it is not written.")


def _class(kind: str) -> Global:
    """Return the class with this full name, which is not nested in another class."""
    module, _, name = kind.rpartition(".")
    return Global(module, name)


def _wrapper(value: Composite) -> Call:
    """Return the call for a tensor of a subclass that only wraps others, which are in its state."""
    parts = value.parts
    if {*parts, "attributes"} != {*WRAPPER, "attributes"}:
        raise UnsupportedError(f"A tensor of {value.kind[:200]} has unknown parts.")
    cls = _class(value.kind)
    arguments = (cls, *(parts[name] for name in WRAPPER))
    function = Global("torch._tensor", "_rebuild_from_type_v2")
    return Call(function, (_utils("_rebuild_wrapper_subclass"), cls, arguments, parts.get("attributes", {})))


def _described(call: Call, cls: str, attributes: Any) -> Call:
    """Wrap `call` in one that sets the class and attributes of a tensor, if it needs any."""
    if cls == "torch.Tensor" and not attributes:
        return call
    function = Global("torch._tensor", "_rebuild_from_type_v2")
    return Call(function, (call.function, _class(cls), call.args, attributes or {}))
