"""The nodes of a state dict for which Python has no inert type.

A tree is the value of a pickle: dict, OrderedDict, list, tuple, set, frozenset, str, bytes, bytearray, int, float,
complex, bool, None, range, slice, Ellipsis, Counter, deque, defaultdict with a builtin factory; `LazyTensor`s; and the
nodes here. None of them runs, imports or opens anything.
"""

from __future__ import annotations

import reprlib
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from ckptconv.errors import UnsupportedError
from ckptconv.text import some

_T = TypeVar("_T", bound=tuple[Any, ...])


def _equal_only_to_its_kind(cls: type[_T]) -> type[_T]:
    """Make a NamedTuple equal no other tuple: a dict may have a class or dtype and a tuple of its parts as two keys."""

    def equal(self: _T, other: object) -> bool:
        return type(other) is cls and tuple.__eq__(self, other)

    def unequal(self: _T, other: object) -> bool:
        return not equal(self, other)

    # The hash stays that of a tuple.
    cls.__eq__ = equal  # type: ignore[method-assign, assignment]
    cls.__ne__ = unequal  # type: ignore[method-assign, assignment]
    return cls


@_equal_only_to_its_kind
class Global(NamedTuple):
    """A class or function that a pickle names. Only the name: nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def brief(self, limit: int) -> str:
        """Return the dotted name as a message shows it: at most `limit` characters of each part, all printable."""
        return repr(f"{self.module[:limit]}.{self.name[:limit]}")[1:-1]


# Most levels of calling the result of a call of the result of a call …
CALL_DEPTH = 16


class _Node:
    """A node that is shown by its content, which may contain the node itself."""

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Opaque(_Node):
    """An object of a class not known to be data: the call that would make it. The object is never made.

    `call` is the way in which the pickle makes it: "reduce" (callable and arguments), "newobj" (class.__new__),
    "newobj_ex" (with `kwargs`), or "persistent" (a persistent id in `args`). `state` holds the argument of each BUILD
    in turn. `appended` and `items` are the elements added to it as to a list or a dict. `cls` is a `Global`, or an
    `Opaque` for a callable that was itself the result of a call.
    """

    def __init__(
        self,
        cls: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        call: str = "reduce",
        state: list[Any] | None = None,
        appended: list[Any] | None = None,
        items: list[tuple[Any, Any]] | None = None,
    ) -> None:
        self.cls, self.args, self.kwargs, self.call = cls, args, kwargs, call
        self.state = [] if state is None else state
        self.appended = [] if appended is None else appended
        self.items = [] if items is None else items

    @property
    def name(self) -> str:
        """The dotted name of its class or function."""
        return str(self.cls) if isinstance(self.cls, Global) else self.cls.name


class Replaced(Opaque):
    """The stand-in for an object that became another node when it got its state. No tree may contain it."""


class Size(tuple[int, ...]):
    """A torch.Size."""

    __slots__ = ()


@_equal_only_to_its_kind
class TorchConstant(NamedTuple):
    """A named value of torch: kind "dtype", "device", "layout", "qscheme" or "memory_format", and its name without
    "torch." (a device as "cuda:0")."""

    kind: str
    name: str


@_equal_only_to_its_kind
class NumpyScalar(NamedTuple):
    """A numpy scalar: its dtype string (such as "<f8") and its bytes."""

    dtype: str
    data: bytes


class NumpyArray(_Node):
    """A numpy array of plain elements: dtype string, shape, "C" or "F" order, and its bytes in that order."""

    def __init__(self, dtype: str, shape: tuple[int, ...], order: str, data: bytes) -> None:
        self.dtype, self.shape, self.order, self.data = dtype, shape, order, data


def become(node: Opaque, array: NumpyArray) -> NumpyArray:
    """Turn `node` into `array` in place, for all that refer to it: Python, too, makes an array before it fills it."""
    target: Any = node
    target.__class__ = NumpyArray
    target.__dict__ = vars(array)
    return target  # type: ignore[no-any-return]


class Composite(_Node):
    """A tensor made of several: `kind` (such as "sparse_coo", "quantized", "nested", "meta") and its parts by name,
    tensors and plain values."""

    def __init__(self, kind: str, parts: dict[str, Any]) -> None:
        self.kind, self.parts = kind, parts


# The composites whose parts are known, and the parts that every one of a kind has, in the order in which torch's
# functions for making them take them.
COMPOSITES: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values", "shape"),
    "sparse_csr": ("crow_indices", "col_indices", "values", "shape"),
    "sparse_bsr": ("crow_indices", "col_indices", "values", "shape"),
    "sparse_csc": ("ccol_indices", "row_indices", "values", "shape"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values", "shape"),
    "nested": ("values", "sizes", "strides", "storage_offsets"),
    "meta": ("dtype", "shape", "strides"),
    "quantized": ("values", "qscheme"),
}
SPARSE = tuple(kind for kind in COMPOSITES if kind.startswith("sparse_"))
# The parameters of a quantized tensor: for the whole tensor, or for each row or column.
QUANTIZERS = (("scale", "zero_point"), ("scales", "zero_points", "axis"))
# The parts of a tensor of a subclass that wraps others, which are in its attributes.
WRAPPER = ("dtype", "shape", "strides", "storage_offset", "layout", "device", "requires_grad")


_META = "saved from the meta device"


_UNINITIALIZED = "never initialized, because the model was not called before the save"


_DISTRIBUTED = "distributed over several processes, each of which saved its own part"


_PARTIAL = "placed as Partial: each rank has only a summand of every element"


_ADVICE = {
    _UNINITIALIZED: "Call the model once before saving, or leave out the tensors with --exclude.",
    _PARTIAL: "Redistribute the tensors to Shard or Replicate before saving, or leave them out with --exclude.",
    _META: "Save the checkpoint again with its weights loaded, or leave out these tensors with --exclude.",
    _DISTRIBUTED: (
        "Put the files of all ranks in one directory, with each rank in its name (model_rank0.pt, model_rank1.pt, …), "
        "and convert the directory; or gather whole tensors before saving; or leave these out with --exclude."
    ),
}


# Parameters and buffers of lazy modules, until their first call.
_LAZY = ("torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer")
# The kinds of composites without data. "partial" is none of torch's: it stands for a DTensor that is placed so.
_WITHOUT = {"meta": _META, "partial": _PARTIAL}


def class_of(node: Any) -> str:
    """Return the class or function that `node` is known by; "" for data."""
    if type(node) is Composite:
        return "" if node.kind in COMPOSITES else node.kind
    return node.name if type(node) is Opaque else str(node) if type(node) is Global else ""


def lacks_data(node: Any) -> str:
    """Return why a tensor's data is not in its file; "" if it is, or if `node` is no tensor."""
    if type(node) is Composite and node.kind in _WITHOUT:
        return _WITHOUT[node.kind]
    name = class_of(node)
    if name in _LAZY and type(node) is Opaque:
        return _UNINITIALIZED
    return _DISTRIBUTED if is_distributed_class(name) else ""


def is_distributed_class(name: str) -> bool:
    """Return whether this is a class of distributed tensors, of which each process has a part."""
    return name.startswith("torch.distributed.") and name.endswith((".DTensor", ".ShardedTensor"))


def without_data(where: str, reasons: Mapping[str, str]) -> UnsupportedError:
    """Return the error for tensors whose data the file `where` lacks; `reasons` has the reason of each name."""
    reason = next(iter(reasons.values()))
    names = [name for name, why in reasons.items() if why == reason]
    count = f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
    return UnsupportedError(f"{where} lacks the data of {count}, {reason}: {some(names)}.", _ADVICE[reason])


# Types of keys that are hashed at once, and of which equal ones are the same; integers may be long.
PLAIN_KEYS = frozenset((str, bytes, bool, type(None), type(...), Composite))


def today(name: tuple[str, str]) -> tuple[str, str]:
    """Return the Python 3 (module, name) of the Python 2 `name`, which is (module, name) too."""
    module, attribute = NAME_MAPPING.get(name, name)
    return IMPORT_MAPPING.get(module, module), attribute
