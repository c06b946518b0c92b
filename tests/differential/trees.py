"""What a value is, in plain data: the same for what torch or Python made as for what we read.

A tree is a list of nodes, each a label and its children; a child is the number of a node, or text where only the value
counts. The root is the last child of node 0. So types, the order of keys, the bits of floats and of tensors, and what
is shared with what can be sent from another process, and compared.
"""

from __future__ import annotations

import _codecs
import _compat_pickle
import builtins
import contextlib
import copyreg
import hashlib
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Child: TypeAlias = "str | int"
Node: TypeAlias = "list[Any]"  # [label, [child, …]]
Tree: TypeAlias = "list[Node]"

# A subtree that says only how it would be made: what another reader made of it cannot be told from that.
UNMADE = "unmade"
MOST_NODES = 100_000
_BUILTINS = [
    "dict", "list", "tuple", "set", "frozenset", "bytes", "bytearray", "str", "bool", "int", "float", "complex",
    "range", "slice", "object", "Ellipsis",
]  # fmt: skip


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    """copyreg's own, that makes what stands for an object too."""
    return cls.__new__(cls) if base is object and type(cls) is Named else copyreg._reconstructor(cls, base, state)


_reconstructor.__module__ = "copyreg"
# What readers of pickles really call: it makes containers and numbers, and nothing else.
HARMLESS: dict[tuple[str, str], Any] = {
    **{("builtins", name): getattr(builtins, name) for name in _BUILTINS},
    **{("collections", kind.__name__): kind for kind in (OrderedDict, Counter, deque, defaultdict)},
    ("_codecs", "encode"): _codecs.encode,
    **{("copyreg", name): getattr(copyreg, name) for name in ("__newobj__", "__newobj_ex__")},
    ("copyreg", "_reconstructor"): _reconstructor,
}
# Of these, and of torch's, what calls its arguments.
CALLERS = frozenset(
    f"name {name!r}"
    for name in (
        "copyreg._reconstructor",
        "copyreg.__newobj__",
        "copyreg.__newobj_ex__",
        "torch._tensor._rebuild_from_type_v2",
    )
)
_TORCH_FUNCTIONS = [
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_qtensor", "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._utils._rebuild_device_tensor_from_numpy", "torch._tensor._rebuild_from_type_v2", "torch.Size",
    "torch.device", "torch.serialization._get_layout", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
    "torch._tensor.Tensor", "torch.Tensor", "numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer", "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy.core.numeric._frombuffer",
]  # fmt: skip
_OLD_TENSORS = ["Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"]


def harmless_of_torch() -> dict[tuple[str, str], Any]:
    """`HARMLESS`, and what torch and numpy make tensors and arrays with."""
    import importlib

    import torch

    found = dict(HARMLESS)
    for path in _TORCH_FUNCTIONS:
        module, _, name = path.rpartition(".")
        home = module.replace("numpy.core", "numpy._core")
        with contextlib.suppress(AttributeError, ImportError):  # of other releases
            found[module, name] = getattr(importlib.import_module(home), name)
    found.update(constants_of_torch())
    found.update({("torch", kind.__name__): kind for kind in torch._storage_classes})
    found.update({(module, "UntypedStorage"): torch.UntypedStorage for module in ("torch", "torch.storage")})
    found.update({("torch", f"{kind}Tensor"): getattr(torch, f"{kind}Tensor") for kind in _OLD_TENSORS})
    return found


def constants_of_torch() -> dict[tuple[str, str], Any]:
    import torch

    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    return {("torch", name): value for name, value in vars(torch).items() if isinstance(value, kinds)}


def usual_name(module: str, name: str) -> tuple[str, str]:
    """A name as Python 3 has it, where the pickle has it as Python 2 had it."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


_STORAGES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex128": "ComplexDouble",
    "complex64": "ComplexFloat", "quint8": "QUInt8", "qint8": "QInt8", "qint32": "QInt32", "quint4x2": "QUInt4x2",
    "quint2x4": "QUInt2x4",
}  # fmt: skip


def named(module: str, name: str) -> str:
    """What a name is, whoever looked it up."""
    if module.partition(".")[0] == "torch" and name.removesuffix("Storage") in _STORAGES.values():
        return f"storage class {name}"
    return "name " + ascii(".".join(usual_name(module, name))).replace("numpy.core.", "numpy._core.")


def digest(data: bytes) -> str:
    return data.hex() if len(data) <= 32 else f"{len(data)} bytes {hashlib.sha1(data).hexdigest()}"


def atom(value: Any) -> str | None:
    """The text of a value that has no parts and no identity; None for any other."""
    kind = type(value)
    if value is None or value is ... or kind in (bool, int, range):
        return f"{kind.__name__} {value!r}" if kind is not int or value.bit_length() < 4000 else f"int {value:#x}"
    if kind is float:
        return f"float {struct.pack('>d', value).hex()}"
    if kind is complex:
        return f"complex {struct.pack('>dd', value.real, value.imag).hex()}"
    if kind is str:
        return f"str {value!a}" if len(value) < 200 else f"str {digest(value.encode('utf-8', 'surrogatepass'))}"
    return f"bytes {digest(value)}" if kind is bytes else None


class TooLargeError(Exception):
    """A tree of more nodes than are looked at."""


# What a value that is none of Python's own containers consists of: its label and its parts; text if it has none.
Describe: TypeAlias = Callable[[Any], "str | Shared | tuple[str, list[Any]]"]


class Text:
    """A child that is text already."""

    def __init__(self, text: str) -> None:
        self.text = text


class Shared:
    """A child without parts that may be shared: by what `key` is."""

    def __init__(self, key: Any, label: str) -> None:
        self.key, self.label = key, label


def tree_of(value: Any, describe: Describe) -> Tree:
    """The tree of a value, whose parts that Python itself does not have are known to `describe`."""
    nodes: Tree = [["root", []]]
    numbers: dict[Any, int] = {}
    kept: list[Any] = []  # what was numbered by its id
    stack: list[tuple[int, Any]] = [(0, value)]

    def number(key: Any, part: Any) -> tuple[int, bool]:
        if key in numbers:
            return numbers[key], False
        if len(nodes) >= MOST_NODES:
            raise TooLargeError(f"more than {MOST_NODES} nodes")
        kept.append(part)
        numbers[key] = len(nodes)
        nodes.append(["", []])
        return numbers[key], True

    def child(part: Any) -> Child:
        if isinstance(part, Text):
            return part.text
        text = atom(part)
        if text is not None:
            return text
        if type(part) in (tuple, frozenset) and not part:
            return f"empty {type(part).__name__}"
        if isinstance(part, Shared):
            at, _ = number(("shared", part.key), part)
            nodes[at][0] = part.label
            return at
        kind = type(part)
        described = None if kind in _PARTS else _set(part, describe) if kind in (set, frozenset) else describe(part)
        if isinstance(described, (str, Shared)):
            return child(described) if isinstance(described, Shared) else described
        at, new = number(id(part), part)
        if new:
            label, parts = described or _PARTS[type(part)](part)
            nodes[at][0] = label
            stack.append((at, parts))
        return at

    nodes[0][1] = [child(value)]
    stack.pop(0)
    while stack:
        at, parts = stack.pop()
        nodes[at][1] = [child(part) for part in parts]
    return nodes


def _mapping(value: Any) -> tuple[str, list[Any]]:
    parts = [part for pair in value.items() for part in pair]
    label = type(value).__name__
    if type(value) is defaultdict:
        label += f" of {value.default_factory.__name__ if value.default_factory else None}"
    attributes = getattr(value, "__dict__", None)
    if attributes:
        label += " with attributes"
        parts.append(attributes)
    return f"{label} of {len(value)}", parts


def _set(value: Any, describe: Describe) -> tuple[str, list[Any]]:
    # In the order of what they are: sets have none.
    return f"{type(value).__name__} of {len(value)}: {sorted(_element(part, describe) for part in value)}", []


def _element(value: Any, describe: Describe) -> str:
    text = atom(value)
    if text is not None:
        return text
    if type(value) is tuple:
        return f"({', '.join(_element(part, describe) for part in value)})"
    if type(value) is frozenset:
        return _set(value, describe)[0]
    described = describe(value)
    return described if isinstance(described, str) else "something"


_PARTS: dict[type, Callable[[Any], tuple[str, list[Any]]]] = {
    dict: _mapping, OrderedDict: _mapping, Counter: _mapping, defaultdict: _mapping,
    list: lambda value: (f"list of {len(value)}", value),
    tuple: lambda value: (f"tuple of {len(value)}", list(value)),
    deque: lambda value: (f"deque of {len(value)}, at most {value.maxlen}", list(value)),
    bytearray: lambda value: (f"bytearray {digest(bytes(value))}", []),
    slice: lambda value: ("slice", [value.start, value.stop, value.step]),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ what others made


class Inert:
    """What stands for an object of a class that readers do not have: what it was made from, as `Opaque` does."""

    found = ("", "")
    how, args, kwargs = "", (), None

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return cls.made("newobj_ex" if kwargs else "newobj", cls, args, kwargs)

    @classmethod
    def made(cls, how: str, function: Any, args: Any, kwargs: Any = None) -> Inert:
        self = object.__new__(Inert)
        self.how, self.function, self.args, self.kwargs = how, function, args, kwargs or None
        self.state: list[Any] = []
        self.appended: list[Any] = []
        self.items: list[tuple[Any, Any]] = []
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return Inert.made("reduce", self, args, kwargs)

    def __setstate__(self, state: Any) -> None:
        self.state.append(state)

    def append(self, value: Any) -> None:
        self.appended.append(value)

    def extend(self, values: Any) -> None:
        self.appended.extend(values)

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


class Named(type):
    """The type of what a name stands for that readers do not have. It notes its calls, and does nothing."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.calls.append(cls.found)
        return Inert.made("reduce", cls, args, kwargs)


def inert(module: str, name: str, calls: list[tuple[str, str]]) -> Any:
    """What stands for the name in a pickle; `calls` are told when it is called."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Inert:
        calls.append((module, name))
        return Inert.made("newobj_ex" if kwargs else "newobj", cls, args, kwargs)

    return Named("Inert", (Inert,), {"found": (module, name), "calls": calls, "__new__": new})


def theirs(value: Any) -> str | Shared | tuple[str, list[Any]]:
    """A value that a reader made."""
    kind = type(value)
    if kind is Named:
        return named(*value.found)
    if kind is Inert:
        parts = [value.function, value.args, value.kwargs, value.state, value.appended, value.items]
        return f"object by {value.how.removesuffix('_ex')}", parts
    if kind.__module__ == "torch.serialization" and kind.__name__ == "StorageType":
        return f"storage class {_STORAGES[str(value.dtype).removeprefix('torch.')]}Storage"
    if isinstance(value, type) or kind.__name__ in ("function", "builtin_function_or_method"):
        return named(value.__module__ or "", value.__qualname__)
    module = kind.__module__.partition(".")[0]
    if module == "torch":
        return _of_torch(value)
    if module == "numpy":
        if kind.__name__ == "ndarray":
            data = value.tobytes(order="A")
            order = "C" if value.flags.c_contiguous else "F"
            return f"array {_order_told(value.dtype.str)} {value.shape} {order} {digest(data)}", []
        if hasattr(value, "tobytes"):
            return f"scalar {_order_told(value.dtype.str)} {digest(value.tobytes())}"
    return f"other {kind.__module__}.{kind.__qualname__}", []


def _order_told(dtype: str) -> str:
    """A dtype of numpy, without the order of the bytes where there is only one."""
    return f"|{dtype[1:]}" if dtype[2:] == "1" and dtype[1] != "U" else dtype


def _of_torch(value: Any) -> str | Shared | tuple[str, list[Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) is torch.Size:
        return f"Size {tuple(value)}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, torch.device)):
        return f"{type(value).__name__} {str(value).removeprefix('torch.')}"
    if isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
        untyped = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
        dtype = getattr(value, "dtype", torch.uint8)
        label = f"storage {str(dtype).removeprefix('torch.')} {digest(bytes(untyped))}"
        return Shared((untyped.data_ptr(), dtype), label) if untyped.nbytes() else label
    return f"other {type(value).__module__}.{type(value).__qualname__}", []


def _held(storage: Any) -> Any:
    if not storage.nbytes():
        return Text("no bytes")
    return Shared(storage.data_ptr(), f"memory of {storage.nbytes()} bytes")


def bits(tensor: Any) -> bytes:
    """The elements of a strided tensor of torch, in order."""
    import torch

    if not tensor.numel():
        return b""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # to copy what is neither 0 nor 1 would make it 1
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)  # whatever the strides are of dimensions of one element
    plain.copy_(tensor.detach())
    return bytes(plain.untyped_storage())


def _brief(tensor: Any) -> Text:
    """A part of a tensor that is made of several."""
    return Text(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {digest(bits(tensor))}")


_TENSORS = {
    "torch.Tensor": "tensor",
    "torch.nn.parameter.Parameter": "parameter",
    "torch.nn.parameter.Buffer": "buffer",
}


def _tensor(value: Any) -> tuple[str, list[Any]]:
    import torch

    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    kind = _TENSORS.get(kind, kind)
    if kind == "tensor" and getattr(value, "_is_buffer", None) is True:
        kind = "buffer"
    attributes = {name: found for name, found in vars(value).items() if not name.startswith("_backward")}
    shape = tuple(value.shape) if not value.is_nested else None
    plain = value.detach()
    if value.is_nested or value.is_mkldnn or value.is_meta:
        return UNMADE, []
    if plain.layout is torch.sparse_coo:
        return f"sparse_coo {shape}", [_brief(plain._indices()), _brief(plain._values())]
    if plain.layout in (torch.sparse_csr, torch.sparse_bsr):
        return f"{plain.layout} {shape}", [
            _brief(part()) for part in (plain.crow_indices, plain.col_indices, plain.values)
        ]
    if plain.layout in (torch.sparse_csc, torch.sparse_bsc):
        return f"{plain.layout} {shape}", [
            _brief(part()) for part in (plain.ccol_indices, plain.row_indices, plain.values)
        ]
    if plain.is_quantized:
        return f"quantized {value.dtype} {shape} {value.qscheme()}", [Text(digest(bits(plain.int_repr())))]
    label = f"tensor {str(value.dtype).removeprefix('torch.')} {shape} {kind}{' grad' if value.requires_grad else ''}"
    label += " with attributes" if attributes else ""
    parts = [attributes] if attributes else []
    if not value.numel():
        return label, parts
    label += f" strides {significant(shape, value.stride())} at {value.storage_offset()}: {digest(bits(value))}"
    return label, [*parts, _held(value.untyped_storage())]


def significant(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [stride for extent, stride in zip(shape, strides, strict=True) if extent > 1]


# ----------------------------------------------------------------------------------------------------- what we read


def ours(value: Any) -> str | Shared | tuple[str, list[Any]]:
    """A value that we read."""
    from compare import evaluate

    from ckptconv.formats.torch.storages import Storage
    from ckptconv.pickles.nodes import Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant
    from ckptconv.tensors.lazy import LazyTensor, Tagged
    from ckptconv.tensors.strides import contiguous_strides

    kind = type(value)
    if kind is Global:
        return named(*value)
    if kind is Opaque:
        if type(value.cls) is Global and is_harmless(*value.cls):
            return UNMADE, []
        # What is called sees its arguments, and not the tuple that they were in.
        args = value.args if value.call == "persistent" else (*value.args,)
        parts = [value.cls, args, value.kwargs or None, value.state, value.appended, value.items]
        return f"object by {value.call.removesuffix('_ex')}", parts
    if kind is Size:
        return f"Size {tuple(value)}"
    if kind is TorchConstant:
        return f"{value.kind} {value.name}"
    if kind is NumpyArray:
        order = value.order if sum(extent > 1 for extent in value.shape) > 1 else "C"
        return f"array {value.dtype} {value.shape} {order} {digest(value.data)}", []
    if kind is NumpyScalar:
        return f"scalar {value.dtype} {digest(value.data)}"
    if kind is Composite:
        return _composite(value, evaluate)
    if kind is Storage:
        label = f"storage {value.dtype} {digest(evaluate(value))}"
        return Shared((value.facts.storage, value.dtype), label) if value.nbytes else label
    if isinstance(value, LazyTensor):
        if not _can_be_evaluated(value):
            return UNMADE, []
        if not isinstance(value, Tagged):
            return f"tensor {value.dtype} {value.shape}: {digest(evaluate(value))}", []
        facts = value.facts
        label = f"tensor {value.dtype} {tuple(value.shape)} {facts.kind}{' grad' if facts.requires_grad else ''}"
        attributes = _attributes(facts.attributes)
        label += " with attributes" if attributes else ""
        parts = [attributes] if attributes else []
        if not value.numel:
            return label, parts
        strides = significant(value.shape, facts.strides or contiguous_strides(value.shape))
        label += f" strides {strides} at {facts.storage_offset}: {digest(evaluate(value))}"
        return label, [*parts, _shared(facts)]
    return f"other {kind.__module__}.{kind.__qualname__}", []


def _can_be_evaluated(value: Any) -> bool:
    """Whether `evaluate` knows what makes the elements: casts, and negation of rare dtypes, are tested elsewhere."""
    from ckptconv.tensors.moves import Cast, Negate

    kernels = [kernel for move in value.moves(0, value.nbytes) for kernel in move.kernels]
    return not any(
        isinstance(kernel, Cast)
        or (isinstance(kernel, Negate) and kernel.dtype not in ("float32", "float64", "complex64"))
        for kernel in kernels
    )


def _attributes(state: Any) -> Any:
    """The attributes that a state sets, which may be two: of the object's dictionary, and of its slots."""
    if type(state) is tuple and len(state) == 2 and all(part is None or isinstance(part, dict) for part in state):
        return {**(state[0] or {}), **(state[1] or {})}
    return state


def _shared(facts: Any) -> Any:
    if not facts.storage_nbytes:
        return Text("no bytes")
    return Shared(facts.storage, f"memory of {facts.storage_nbytes} bytes")


def is_harmless(module: str, name: str) -> bool:
    """Whether readers really call what is named so."""
    of_torch = module in ("torch", "torch.storage") and name.endswith(("Storage", "Tensor"))
    return usual_name(module, name) in HARMLESS or f"{module}.{name}" in _TORCH_FUNCTIONS or of_torch


def _composite(value: Any, evaluate: Callable[[Any], bytes]) -> tuple[str, list[Any]]:
    def brief(name: str) -> Text:
        part = value.parts[name]
        return Text(f"{part.dtype} {tuple(part.shape)} {digest(evaluate(part))}")

    parts = value.parts
    try:
        if value.kind == "sparse_coo":
            return f"sparse_coo {tuple(parts['shape'])}", [brief("indices"), brief("values")]
        if value.kind.startswith("sparse_"):
            names = [name for name in parts if name.endswith("indices")]
            shape = tuple(parts["shape"])
            return f"torch.{value.kind} {shape}", [*map(brief, names), brief("values")]
        if value.kind == "quantized" and "shape" not in parts:
            values = parts["values"]
            label = f"quantized torch.{values.dtype} {tuple(values.shape)} torch.{parts['qscheme'].name}"
            return label, [Text(digest(evaluate(values)))]
    except (AttributeError, KeyError, TypeError):
        pass  # made of what no tensor is made of
    return UNMADE, []


# ----------------------------------------------------------------------------------------------------- comparisons

_ARRAY = re.compile(r"array [<>|=][biufc]\d")


def difference(our: Tree, their: Tree) -> str:
    """Where two trees differ first, and how: ours, then theirs; "" if they are the same."""
    partner: dict[int, int] = {}
    back: dict[int, int] = {}
    stack: list[tuple[Child, Child, str]] = [(our[0][1][-1], their[0][1][-1], "")]
    while stack:
        left, right, path = stack.pop()
        shown = path or "the root"
        if isinstance(left, int) and our[left][0] == UNMADE:
            # That says how it would be made; but an array of numbers is one that we should have read.
            if isinstance(right, int) and _ARRAY.match(their[right][0]):
                return f"{shown}: object | {their[right][0][:300]}"
            continue
        if isinstance(right, int) and their[right][0] == UNMADE:
            continue
        if isinstance(left, str) or isinstance(right, str):
            if left != right:
                texts = [at if isinstance(at, str) else nodes[at][0] for at, nodes in ((left, our), (right, their))]
                return f"{shown}: {texts[0][:300]} | {texts[1][:300]}"
            continue
        if left in partner or right in back:
            if partner.get(left) != right or back.get(right) != left:
                which = "shared in ours only" if left in partner else "shared in theirs only"
                return f"{shown}: {our[left][0][:100]} is {which}"
            continue
        partner[left], back[right] = right, left
        (label, parts), (other, others) = our[left], their[right]
        if label != other or len(parts) != len(others):
            return f"{shown}: {label[:300]} | {other[:300]}"
        keyed = label.split()[0] in ("dict", "OrderedDict", "Counter", "defaultdict")
        steps = list(_steps(parts)) if keyed else [f"{path}[{at}]" for at in range(len(parts))]
        stack.extend(
            (a, b, f"{path}.{step}" if keyed else step)
            for a, b, step in reversed(list(zip(parts, others, steps, strict=False)))
        )
    return ""


def _steps(parts: list[Child]) -> Iterator[str]:
    for at in range(0, len(parts), 2):
        key = parts[at] if isinstance(parts[at], str) else "(…)"
        yield f"<key {at // 2}>"
        yield str(key).removeprefix("str ")[:40]
