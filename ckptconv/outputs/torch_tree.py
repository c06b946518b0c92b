"""A tree as a `.pt` file: its pickle, with tensors rebuilt by the functions torch itself names, and its storages.

Source: `torch/_utils.py`, `torch/_tensor.py` and `torch/storage.py`; what is written is what torch.save writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import UnsupportedError
from ckptconv.pickling import Call, PersistentId, dumps
from ckptconv.plan import FilePlan
from ckptconv.tensors import LazyTensor, Tagged, TensorFacts, untagged
from ckptconv.tree import Composite, Global, Opaque, TorchConstant

from .torch_storage import Placed, storage_of, strides_of
from .torch_zip import file_plan

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


def plan_tree(name: str, tree: Any, stem: str = "archive", writable: frozenset[Global] = frozenset()) -> FilePlan:
    """The archive `name` of `tree`. Tensors that shared a storage share it again.

    Objects of classes that are known by name only are written if their class is in `writable`. Raises UnsupportedError
    for others: whoever loads the file would run what they name.
    """
    storages = _Storages(writable)
    description = dumps(tree, storages.reduce)
    return file_plan(name, description, storages.contents(), stem)


def _utils(name: str) -> Global:
    return Global("torch._utils", name)


@dataclass
class _Storages:
    """The storages met so far, by what their tensors have in common, each with the views of it."""

    writable: frozenset[Global] = frozenset()
    numbers: dict[Hashable, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    views: list[list[Placed]] = field(default_factory=list)

    def contents(self) -> list[LazyTensor]:
        return [storage_of(views, size) for views, size in zip(self.views, self.sizes, strict=True)]

    def reduce(self, value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return self.leaf(value)
        if isinstance(value, Composite):
            return self.composite(value)
        if isinstance(value, Opaque):
            return self.object(value)
        return None

    def object(self, value: Opaque) -> Call:
        """An object as its pickle had it made."""
        if value.cls not in self.writable or not isinstance(value.args, tuple) or value.kwargs or len(value.state) > 1:
            raise UnsupportedError(f"An object of {value.name} is known by name only, and cannot be written for torch.")
        state = value.state[0] if value.state else None
        if value.call == "newobj":
            return Call(Global("copy_reg", "__newobj__"), (value.cls, *value.args), state, value.appended, value.items)
        return Call(value.cls, value.args, state, value.appended, value.items)

    def leaf(self, leaf: LazyTensor) -> Call:
        """A tensor, and what it is beside its bytes: a parameter, a subclass, attributes."""
        facts = leaf.facts if isinstance(leaf, Tagged) else TensorFacts()
        plain = facts.kind in ("tensor", "buffer")
        made = self.tensor(leaf, facts, facts.requires_grad and plain)
        if facts.kind == "parameter":
            arguments: tuple[Any, ...] = (made, facts.requires_grad, OrderedDict())
            if facts.attributes:
                return Call(_utils("_rebuild_parameter_with_state"), (*arguments, facts.attributes))
            return Call(_utils("_rebuild_parameter"), arguments)
        if not facts.attributes and plain:
            return made
        cls = Global("torch", "Tensor") if plain else Global(*facts.kind.rpartition(".")[::2])
        return Call(
            Global("torch._tensor", "_rebuild_from_type_v2"), (made.function, cls, made.args, facts.attributes or {})
        )

    def tensor(self, leaf: LazyTensor, facts: TensorFacts, requires_grad: bool) -> Call:
        dtype, shape = leaf.dtype, leaf.shape
        strides = strides_of(leaf, facts.strides if facts.storage is not None else ())
        cls = _CLASSES.get(dtype.name)
        arguments = (self.storage(leaf, facts, strides, cls), *self.place(facts), tuple(shape), strides)
        if cls is None:
            dtype_constant = TorchConstant("dtype", dtype.name)
            return Call(_utils("_rebuild_tensor_v3"), (*arguments, requires_grad, OrderedDict(), dtype_constant))
        return Call(_utils("_rebuild_tensor_v2"), (*arguments, requires_grad, OrderedDict()))

    @staticmethod
    def place(facts: TensorFacts) -> tuple[int]:
        return (facts.storage_offset if facts.storage is not None else 0,)

    def storage(self, leaf: LazyTensor, facts: TensorFacts, strides: tuple[int, ...], cls: str | None) -> PersistentId:
        tensor = untagged(leaf)
        key: Hashable = facts.storage if facts.storage is not None else ("own", len(self.sizes))
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.sizes)
            self.sizes.append(facts.storage_nbytes if facts.storage is not None else tensor.nbytes)
            self.views.append([])
        self.views[number].append(Placed(tensor, *self.place(facts), strides))
        size = self.sizes[number]
        if cls is None:
            return PersistentId(("storage", Global("torch.storage", "UntypedStorage"), str(number), "cpu", size))
        count = size // tensor.dtype.itemsize
        return PersistentId(("storage", Global("torch", f"{cls}Storage"), str(number), "cpu", count))

    def composite(self, value: Composite) -> Call:
        """A tensor that is made of several."""
        parts = value.parts
        if value.kind == "sparse_coo":
            layout = TorchConstant("layout", value.kind)
            coalesced = (parts["is_coalesced"],) if "is_coalesced" in parts else ()
            inner = (parts["indices"], parts["values"], parts["shape"], *coalesced)
            made = Call(_utils("_rebuild_sparse_tensor"), (layout, inner))
        elif value.kind.startswith("sparse_"):
            layout = TorchConstant("layout", value.kind)
            made = Call(_utils("_rebuild_sparse_tensor"), (layout, tuple(list(parts.values())[:4])))
        elif value.kind == "nested":
            names = ("values", "sizes", "strides", "storage_offsets")
            made = Call(_utils("_rebuild_nested_tensor"), tuple(parts[name] for name in names))
        elif value.kind == "meta":
            names = ("dtype", "shape", "strides", "requires_grad")
            made = Call(_utils("_rebuild_meta_tensor_no_storage"), tuple(parts[name] for name in names))
        elif value.kind == "quantized":
            made = self.quantized(parts)
        else:
            raise UnsupportedError(f"A tensor of class {value.kind} is known by name only, and cannot be written.")
        if parts.get("class") == "parameter":
            return Call(_utils("_rebuild_parameter"), (made, bool(parts.get("requires_grad")), OrderedDict()))
        return made

    def quantized(self, parts: dict[str, Any]) -> Call:
        values = parts["values"]
        facts = values.facts if isinstance(values, Tagged) else TensorFacts()
        strides = strides_of(values, facts.strides if facts.storage is not None else ())
        storage = self.storage(values, facts, strides, _CLASSES[values.dtype.name])
        names = ("scale", "zero_point") if "scale" in parts else ("scales", "zero_points", "axis")
        quantizer = (parts["qscheme"], *(parts[name] for name in names))
        shape, strides = tuple(parts.get("shape", values.shape)), parts.get("strides", strides)
        arguments = (storage, *self.place(facts), shape, strides, quantizer)
        return Call(_utils("_rebuild_qtensor"), (*arguments, facts.requires_grad, OrderedDict()))
