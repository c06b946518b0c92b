"""A tree as a `.pt` file: its pickle, with tensors rebuilt by the functions torch itself names, and its storages.

Source: `torch/_utils.py`, `torch/_tensor.py` and `torch/storage.py`; what is written is what torch.save writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv import live
from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.foreign import class_of
from ckptconv.keymap import walk
from ckptconv.pickling import Call, PersistentId, dumps
from ckptconv.plan import FilePlan
from ckptconv.tensors import DTYPES, LazyTensor, Tagged, TensorFacts, contiguous_strides, untagged
from ckptconv.tree import Composite, Global, Opaque, TorchConstant

from .torch_storage import Placed, overlaps, storage_of, strides_of
from .torch_zip import file_plan

# A storage is written whole if its views show half of it, or it is small; else as far as they reach. Views that lie
# further apart than this many times what they show do not share a storage any more.
_SPARSE = 64
_SMALL = 1 << 20


def _is_tensor(part: Any) -> bool:
    return isinstance(part, (LazyTensor, Composite))


def _is_counts(part: Any) -> bool:
    return isinstance(part, tuple) and all(type(count) is int and count >= 0 for count in part)


def _is_constant(part: Any) -> bool:
    return type(part) is TorchConstant


def _is_number(part: Any) -> bool:
    return type(part) in (int, float)


# The parts of each kind of composite, as the functions that make it take them, what they have to be, and these
# functions.
_PARTS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "sparse_coo": {"indices": _is_tensor, "values": _is_tensor, "shape": _is_counts},
    "sparse_csr": {"crow_indices": _is_tensor, "col_indices": _is_tensor, "values": _is_tensor, "shape": _is_counts},
    "sparse_bsr": {"crow_indices": _is_tensor, "col_indices": _is_tensor, "values": _is_tensor, "shape": _is_counts},
    "sparse_csc": {"ccol_indices": _is_tensor, "row_indices": _is_tensor, "values": _is_tensor, "shape": _is_counts},
    "sparse_bsc": {"ccol_indices": _is_tensor, "row_indices": _is_tensor, "values": _is_tensor, "shape": _is_counts},
    "nested": {"values": _is_tensor, "sizes": _is_tensor, "strides": _is_tensor, "storage_offsets": _is_tensor},
    "meta": {
        "dtype": _is_constant,
        "shape": _is_counts,
        "strides": _is_counts,
        "requires_grad": lambda part: type(part) is bool,
    },
    "quantized": {"values": _is_tensor, "qscheme": _is_constant},
}
_QUANTIZERS: tuple[dict[str, Callable[[Any], bool]], ...] = (
    {"scale": _is_number, "zero_point": _is_number},
    {"scales": _is_tensor, "zero_points": _is_tensor, "axis": _is_number},
)
_REBUILDING = {"nested": "_rebuild_nested_tensor", "meta": "_rebuild_meta_tensor_no_storage"}
# The kinds of tensors that are no class of their own; a buffer is an attribute. The memory of tensors is one that may
# stand for itself.
PLAIN_KINDS = frozenset({"tensor", "buffer"})
STORAGE = "storage"
KINDS = PLAIN_KINDS | {"parameter", STORAGE}

# The classes of typed storages; tensors of other dtypes lie in untyped ones.
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


def plan_tree(name: str, tree: Any, stem: str = "archive", writable: frozenset[Global] = frozenset()) -> FilePlan:
    """The archive `name` of `tree`, as `TorchTree` says."""
    return TorchTree(tree, writable).plan(name, stem)


def _utils(name: str) -> Global:
    return Global("torch._utils", name)


@dataclass(slots=True)
class _Room:
    """A storage as it is written: its place in the archive, from which byte on it has what the tensors shared, how
    many bytes, and the class of storage; None where its views are of several dtypes."""

    number: int
    start: int
    nbytes: int
    cls: str | None
    views: list[Placed] = field(default_factory=list)


def _may_overlap(views: list[Placed]) -> bool:
    return len(views) > 1 or not live.is_dense(views[0].tensor.shape, views[0].strides)


class TorchTree:
    """A tree on its way into an archive. Tensors that shared a storage share it again.

    Objects of classes that are known by name only, and these classes, are written if the class is in `writable`.
    Raises UnsupportedError for others: whoever loads the file would run what they name. With `plain`, a tensor of a
    subclass becomes one of torch's own class.
    """

    def __init__(self, tree: Any, writable: frozenset[Global] = frozenset(), *, plain: bool = False) -> None:
        self._writable = frozenset(map(str, writable))
        self._plain = plain
        self._rooms: list[_Room] = []
        self._shared: dict[Hashable, _Room | None] = {}
        self.tensors = 0
        self._arrange(tree)
        self._description = dumps(tree, self._reduce)
        self._contents = [storage_of(room.views, room.nbytes) for room in self._rooms]
        # Of a million storages, these are few, and the others are not looked at again.
        self._overlapping = [room.views for room in self._rooms if _may_overlap(room.views)]
        self._rooms.clear()

    def plan(self, name: str, stem: str = "archive") -> FilePlan:
        """The archive; `stem` is the directory in it."""
        return file_plan(name, self._description, self._contents, stem)

    def overlaps(self) -> Iterator[tuple[LazyTensor, LazyTensor]]:
        """Pairs of tensors that are equal unless views of one storage have changed since they were saved."""
        for views in self._overlapping:
            yield from overlaps(views)

    def _arrange(self, tree: Any) -> None:
        """Find which tensors share a storage, and what is to be written of it."""
        shared: dict[Hashable, list[Tagged]] = {}
        for node in walk(tree):
            if isinstance(node, LazyTensor):
                self.tensors += 1
                facts = node.facts if isinstance(node, Tagged) else TensorFacts()
                if facts.kind not in KINDS and not self._plain:
                    self._refuse(facts.kind)
                if isinstance(node, Tagged) and facts.storage is not None and node.numel:
                    shared.setdefault(facts.storage, []).append(node)
            elif class_of(node):
                self._refuse(class_of(node))
        for storage, leaves in shared.items():
            self._shared[storage] = self._room_of(leaves)

    def _refuse(self, cls: str) -> None:
        """Raise UnsupportedError for a class that is not to be written."""
        if cls not in self._writable:
            raise UnsupportedError(f"{cls} is known by name only, and cannot be written for torch.")

    @staticmethod
    def _room_of(leaves: list[Tagged]) -> _Room | None:
        """What is to be written of the storage of `leaves`; None if each is to have one of its own."""
        spans = [Placed(leaf, leaf.facts.storage_offset, strides_of(leaf, leaf.facts.strides)).span for leaf in leaves]
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        shown = sum(min(leaf.nbytes, high - low) for leaf, (low, high) in zip(leaves, spans, strict=True))
        nbytes = leaves[0].facts.storage_nbytes
        if nbytes <= 2 * shown + _SMALL:
            low, high = 0, max(nbytes, high)
        low -= low % 64  # where elements of any size begin
        if high - low > _SPARSE * shown + _SMALL:
            return None
        dtypes = {leaf.dtype for leaf in leaves}
        cls = _CLASSES.get(leaves[0].dtype.name) if len(dtypes) == 1 else None
        if cls is not None:
            high -= (high - low) % leaves[0].dtype.itemsize  # less than an element, which none shows
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
        """An object as its pickle had it made."""
        made = type(value.cls) is Global and isinstance(value.args, tuple) and value.call in ("reduce", "newobj")
        if not made or value.kwargs or len(value.state) > 1:
            raise UnsupportedError(f"An object of {value.name} is known by name only, and cannot be written for torch.")
        state = value.state[0] if value.state else None
        if value.call == "newobj":
            return Call(Global("copy_reg", "__newobj__"), (value.cls, *value.args), state, value.appended, value.items)
        return Call(value.cls, value.args, state, value.appended, value.items)

    def _leaf(self, leaf: LazyTensor) -> Call | PersistentId:
        """A tensor, and what it is beside its bytes: a parameter, a subclass, attributes; or a storage."""
        facts = leaf.facts if isinstance(leaf, Tagged) else TensorFacts()
        if facts.kind == STORAGE:
            return self._storage(leaf, facts)
        parameter = facts.kind == "parameter"
        made = self._tensor(leaf, facts, facts.requires_grad and not parameter)
        if parameter:
            return _parameter(made, facts.requires_grad, facts.attributes)
        subclass = facts.kind not in PLAIN_KINDS and not self._plain
        return _described(made, facts.kind if subclass else "torch.Tensor", facts.attributes)

    def _storage(self, leaf: LazyTensor, facts: TensorFacts) -> PersistentId:
        """A storage that stands for itself. torch gives it back with the dtype of its class."""
        room, offset, _ = self._place(leaf, facts)
        cls = room.cls or "Byte"  # what an untyped one comes back as
        if offset or room.nbytes != leaf.nbytes or cls != _CLASSES.get(leaf.dtype.name):
            raise UnsupportedError(
                f"A storage of {leaf.nbytes} bytes of {leaf.dtype} is shared with tensors of other dtypes, or that lie "
                "outside of it, which cannot be written for torch.",
                "Leave it out with --exclude.",
            )
        return _persistent(room)

    def _tensor(self, leaf: LazyTensor, facts: TensorFacts, requires_grad: bool) -> Call:
        room, offset, strides = self._place(leaf, facts)
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

    def _place(self, leaf: LazyTensor, facts: TensorFacts) -> tuple[_Room, int, tuple[int, ...]]:
        """The storage that a tensor lies in, the element at which it begins there, and its strides."""
        strides = strides_of(leaf, facts.strides)
        room = self._shared.get(facts.storage) if facts.storage is not None and leaf.numel else None
        offset = 0
        if room is not None:
            offset = facts.storage_offset - room.start // leaf.dtype.itemsize
            if room.number < 0:
                room.number = len(self._rooms)
                self._rooms.append(room)
        else:
            if not live.is_dense(leaf.shape, strides):
                strides = contiguous_strides(leaf.shape)
            room = _Room(len(self._rooms), 0, leaf.nbytes, _CLASSES.get(leaf.dtype.name))
            self._rooms.append(room)
        room.views.append(Placed(untagged(leaf), offset, strides))
        return room, offset, strides

    def _composite(self, value: Composite) -> Call:
        """A tensor that is made of several."""
        parts = value.parts
        unsound = [name for name, is_sound in _PARTS[value.kind].items() if not is_sound(parts.get(name))]
        if unsound:
            raise CorruptError(f"A {value.kind} tensor has no valid {', '.join(unsound)}: its record is not sound.")
        if value.kind == "quantized":
            made = self._quantized(parts)
        else:
            arguments = tuple(parts[name] for name in _PARTS[value.kind])
            if value.kind.startswith("sparse_"):
                more = tuple(parts[name] for name in ("is_coalesced",) if name in parts)
                arguments = (TorchConstant("layout", value.kind), (*arguments, *more))
            made = Call(_utils(_REBUILDING.get(value.kind, "_rebuild_sparse_tensor")), arguments)
        if parts.get("class") == "parameter":
            return _parameter(made, bool(parts.get("requires_grad")), parts.get("attributes"))
        return _described(made, "torch.Tensor", parts.get("attributes"))

    def _quantized(self, parts: Mapping[str, Any]) -> Call:
        values = parts["values"]
        names = _QUANTIZERS["scale" not in parts]
        if not isinstance(values, LazyTensor) or not all(fits(parts.get(name)) for name, fits in names.items()):
            raise CorruptError("A quantized tensor lacks its values or its scale: its record is not sound.")
        facts = values.facts if isinstance(values, Tagged) else TensorFacts()
        room, offset, strides = self._place(values, facts)
        quantizer = (parts["qscheme"], *(parts[name] for name in names))
        # Of values smaller than a byte, the bytes are a flat tensor.
        shape, strides = parts.get("shape", values.shape), parts.get("strides", strides)
        shape = tuple(shape) if isinstance(shape, tuple) else shape
        arguments: tuple[Any, ...] = (_persistent(room), offset, shape, strides, quantizer)
        return Call(_utils("_rebuild_qtensor"), (*arguments, facts.requires_grad, OrderedDict()))


def _persistent(room: _Room) -> PersistentId:
    if room.cls is None:
        return PersistentId("storage", Global("torch.storage", "UntypedStorage"), str(room.number), "cpu", room.nbytes)
    count = room.nbytes // DTYPES[_DTYPES[room.cls]].itemsize
    return PersistentId("storage", Global("torch", f"{room.cls}Storage"), str(room.number), "cpu", count)


def _parameter(made: Call, requires_grad: bool, attributes: Any) -> Call:
    arguments: tuple[Any, ...] = (made, requires_grad, OrderedDict())
    if attributes:
        return Call(_utils("_rebuild_parameter_with_state"), (*arguments, attributes))
    return Call(_utils("_rebuild_parameter"), arguments)


def _described(made: Call, cls: str, attributes: Any) -> Call:
    """A tensor of a class of its own, or with attributes."""
    if cls == "torch.Tensor" and not attributes:
        return made
    module, _, name = cls.rpartition(".")
    function = Global("torch._tensor", "_rebuild_from_type_v2")
    return Call(function, (made.function, Global(module, name), made.args, attributes or {}))
