"""Read a structure record, and put the tensors back: `ckptconv.unflatten`.

Mutable containers are made before their contents, so that cycles close; immutable ones are made from the inside out.
Nothing recurses, nothing that a record names is looked up, and a record built to take forever is refused.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ckptconv.errors import CorruptError, LimitError, UsageError
from ckptconv.features.unflattening.views import viewed_as
from ckptconv.pickles import numpy_dtypes
from ckptconv.pickles.nodes import CALL_DEPTH, Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant
from ckptconv.structure import leaves
from ckptconv.structure.attributes import attributes_fault
from ckptconv.structure.reading import StructureRecord, corrupt, expect, is_count, name_of, node_at, parse, tensors_of
from ckptconv.structure.record import FACTORIES, NAMING, implied_name, inner_prefix
from ckptconv.structure.soundness import composite_fault
from ckptconv.tensors.dtypes import DTYPES, is_differentiable
from ckptconv.tensors.lazy import NO_FACTS, LazyTensor, Tagged, TensorFacts, untagged
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.text import brief, some

DISTRUST = "No program writes such a record by accident: do not trust its source."
# The cost allowed for hashing a record's keys, in elements: an honest key has a handful.
HASHED = 50_000_000
# Keys of one container with the same hash: more are no accident.
COLLIDING = 32
# The deepest nesting of tuples in a key: Python hashes them by recursion without a limit.
KEY_DEPTH = 1000

_FLOAT = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf)", re.ASCII)
_NAN = re.compile(r"nan:[0-9a-f]{16}")
_INTEGER = re.compile(r"-?0x[0-9a-f]+")
# The value of a tensor that was left out.
_DROPPED: Any = object()
_UNREAD: Any = object()
_UNDER_WAY: Any = object()


def unflatten(
    flat: Mapping[str, Any], structure: str | None, *, live_values: bool | None = None, lay_out: bool = True
) -> Any:
    """Return the tree that `structure` describes, with tensors from `flat`: LazyTensors, torch tensors or numpy arrays.

    LazyTensors are returned `Tagged` if the record knows more of them than their bytes. torch tensors become
    parameters, get their attributes, and share memory, as the record says; they may share it with `flat`. Constants of
    torch and numpy values become live objects if `live_values`: by default if torch is imported and no tensor is lazy.
    Nothing else that the record names is made: it stays `Global` and `Opaque`. Tensors whose dimensions had another
    order in memory are copied to that order, unless `lay_out` is false.

    Raise UsageError if `flat` is no mapping or `structure` no text, UnsupportedError for an unknown version,
    CorruptError for a record that is malformed or does not fit `flat`, LimitError for one built to take forever.

    Examples:
        >>> flat, structure = ckptconv.flatten({"layers": [torch.ones(2)], "step": 7})
        >>> ckptconv.unflatten(flat, structure)
        {'layers': [tensor([1., 1.])], 'step': 7}
    """
    arguments: tuple[object, object] = flat, structure
    if not (isinstance(arguments[0], Mapping) and isinstance(arguments[1], (str, type(None)))):
        raise UsageError(f"unflatten expects a mapping and a string, not {brief(flat)} and {brief(structure)}.")
    if structure is None:
        return dict(flat)
    if live_values is None:
        live_values = leaves.is_imported() and not any(isinstance(leaf, LazyTensor) for leaf in flat.values())
    record = parse(structure)
    live = next((leaf for leaf in flat.values() if not isinstance(leaf, LazyTensor)), None)
    memory = None
    if live_values or live is not None:
        memory = leaves.live("memory", "live_values" if live is None else live).Memory(lay_out)
    return RecordDecoder(record, flat, live_values, memory).tree()


def _typed(kind: type, *values: Any) -> tuple[Any, ...]:
    """Return the values if all have exactly this type; else raise CorruptError."""
    for value in values:
        if type(value) is not kind:
            corrupt(f"a {kind.__name__} was expected, but a {type(value).__name__} was found")
    return values


def _decode_float(text: Any) -> float:
    if type(text) is str:
        if _FLOAT.fullmatch(text):
            return float(text)
        if _NAN.fullmatch(text):
            value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
            if math.isnan(value):
                return value
    return corrupt(f"{_short(text)} is not a float")


def _decode_int(text: Any) -> int:
    if type(text) is str and _INTEGER.fullmatch(text):
        return int(text, 16)
    return corrupt(f"{_short(text)} is not an integer")


def _decode_bytes(text: Any) -> bytes:
    if type(text) is str:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass
    return corrupt(f"{_short(text)} is not base64")


def _decode_str(text: Any) -> str:
    try:
        return _decode_bytes(text).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        corrupt(f"a string is not UTF-8 ({error.reason})")


# Nodes that need no children decoded: the number of their parts, and the function that makes the value.
_VALUES: dict[str, tuple[int, Callable[..., Any]]] = {
    "float": (1, _decode_float),
    "int": (1, _decode_int),
    "str": (1, _decode_str),
    "bytes": (1, _decode_bytes),
    "complex": (2, lambda real, imaginary: complex(_decode_float(real), _decode_float(imaginary))),
    "ellipsis": (0, lambda: ...),
}


def _make_array(dtype: Any, shape: Any, order: Any, data: Any) -> NumpyArray:
    _typed(str, dtype, order)
    _typed(bytes, data)
    expect(
        type(shape) is tuple and all(map(is_count, shape)) and order in ("C", "F"),
        "an array has no valid shape or order",
    )
    _check_elements(dtype, math.prod(shape), data)
    return NumpyArray(dtype, shape, order, data)


def _make_scalar(dtype: Any, data: Any) -> NumpyScalar:
    _typed(str, dtype)
    _typed(bytes, data)
    _check_elements(dtype, 1, data)
    return NumpyScalar(dtype, data)


def _check_elements(dtype: str, count: int, data: bytes) -> None:
    """Check the number of bytes, if the dtype gives it."""
    plain = numpy_dtypes.parsed(dtype)
    if plain:
        size = count * plain.itemsize
        expect(size == len(data), f"{count} elements of {dtype} have {len(data)} bytes, but {size} were expected")


def _make_frozenset(values: list[Any]) -> frozenset[Any]:
    elements = frozenset(values)
    expect(len(elements) == len(values), "a frozenset contains an element twice")
    return elements


# Nodes that are made once their children are decoded.
_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "size": lambda values: Size(_typed(int, *values)),
    "frozenset": _make_frozenset,
    "bytearray": lambda values: bytearray(*_typed(bytes, *values)),
    "range": lambda values: range(*_typed(int, *values)),
    "slice": lambda values: slice(*values),
    "global": lambda values: Global(*_typed(str, *values)),
    "torch": lambda values: TorchConstant(*_typed(str, *values)),
    "numpy.scalar": lambda values: _make_scalar(*values),
    "numpy.array": lambda values: _make_array(*values),
}
_EXACT_PARTS = {"bytearray": 1, "range": 3, "slice": 3, "global": 2, "torch": 2, "numpy.scalar": 2, "numpy.array": 4}


def _new_defaultdict(node: list[Any]) -> Any:
    factory = node[1] if len(node) > 1 else None
    if factory is None:
        return defaultdict()
    expect(type(factory) is str and factory in FACTORIES, f"{_short(factory)} is not a known factory")
    return defaultdict(FACTORIES[factory])


def _new_deque(node: list[Any]) -> Any:
    maxlen = node[1] if len(node) > 1 else None
    expect(maxlen is None or (is_count(maxlen) and len(node) - 2 <= maxlen < 1 << 62), "a deque has no valid maxlen")
    return deque(maxlen=maxlen)


# Nodes that are made before their children: how, and how many fields precede the children.
_FILLED: dict[str, tuple[Callable[[list[Any]], Any], int]] = {
    "dict": (lambda node: {}, 0),
    "odict": (lambda node: OrderedDict(), 1),
    "counter": (lambda node: Counter(), 1),
    "defaultdict": (_new_defaultdict, 1),
    "list": (lambda node: [], 0),
    "set": (lambda node: set(), 0),
    "deque": (_new_deque, 1),
    "opaque": (lambda node: Opaque(None), 0),
    "composite": (lambda node: Composite("", {}), 1),
}
_OPAQUE_PARTS = ("cls", "args", "call", "state", "kwargs", "appended", "items")
_KEYED = frozenset({"dict", "odict", "counter", "defaultdict"})
_HASHING = frozenset({"set", "frozenset"})
_CALLS = frozenset({"reduce", "newobj", "newobj_ex", "persistent"})
_LEAF_FIELDS = frozenset({"name", "kind", "requires_grad", "attributes", "is", "storage", "strides", "dtype", "view"})


class _Opened:
    """A node being read: its children, their values so far, and its target.

    `target` is filled with the values. Without one, the node is made from them: as a tensor if `leaf` describes one,
    whose implied name is `prefix`. `slot` is the node's index in the table. `cost` is that of hashing it: its elements,
    shared ones counted each time, and its depth. `hashed` counts the elements that are hashed when it is closed.
    """

    __slots__ = ("at", "cost", "hashed", "leaf", "naming", "node", "prefix", "slot", "target", "values")

    def __init__(
        self, node: Any, target: Any, prefix: str | None, slot: int | None, leaf: dict[str, Any] | None = None
    ) -> None:
        self.node = node
        self.target = target
        self.prefix = prefix
        self.slot = slot
        self.leaf = leaf
        self.at = 1
        self.values: list[Any] = []
        self.cost = (len(node), 1)
        self.hashed = 0
        self.naming = NAMING.get(node[0], (0, False))

    def key(self) -> Any:
        """Return the key or index of the next child, if tensors may be named after it."""
        start, paired = self.naming
        index = self.at - start
        if not start or index < 0:
            return None
        if not paired:
            return index
        return self.values[-1] if index % 2 else None


class RecordDecoder:
    """Reads one record. Mutable containers are made before their contents, so that cycles close; immutable ones are
    made from the inside out.

    `memory` makes live objects of tensors that are not lazy, and if `live_values`, of nodes; None if there are none.
    """

    def __init__(self, record: StructureRecord, flat: Mapping[str, Any], live_values: bool, memory: Any) -> None:
        self.record = record
        self.flat = flat
        self.live_values = live_values
        self.memory = memory
        self.table: list[Any] = [_UNREAD] * len(record.nodes)
        self.costs: dict[int, tuple[int, int]] = {}
        self.hashed = 0
        self.pending: list[_Opened] = []
        # By the number of an object in the record: the tensor, its description in the record, and its flat tensor.
        self.tensors: dict[int, tuple[Any, dict[str, Any], Any]] = {}
        # Checked at the end, when all of it exists.
        self.composites: list[Composite] = []
        self.described: list[tuple[str, Any]] = []
        self.used: set[str] = set()
        self.attributes: list[tuple[Any, Any]] = []
        self.opaques: list[Opaque] = []

    def tree(self) -> Any:
        self._check_names()
        top: list[Any] = []
        # The root is in a list of its own, which adds nothing to its path.
        self.pending.append(_Opened([None, self.record.root], top, "", None))
        stack: list[_Opened] = []
        while stack or self.pending:
            if not stack:
                stack.append(self.pending.pop())
            opened = stack[-1]
            inner = self._read(opened)
            if inner is not None:
                stack.append(inner)
                continue
            stack.pop()
            try:
                value = self._close(opened)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                corrupt(f"a {opened.node[0]} cannot be constructed ({error})")
            if opened.target is None:
                self._deliver(stack[-1], value, opened.cost)
        self._finish()
        return top[0]

    def _check_names(self) -> None:
        wanted = {name_of(leaf, implied) for leaf, implied in tensors_of(self.record) if "dropped" not in leaf}
        missing = sorted(wanted.difference(self.flat))
        extra = sorted(set(self.flat).difference(wanted))
        complaints = []
        if missing:
            complaints.append(f"tensors that it lists are missing ({some(missing)})")
        if extra:
            complaints.append(f"it does not list some tensors ({some(extra)})")
        if complaints:
            raise CorruptError(
                f"The structure record does not match the tensors: {', and '.join(complaints)}.",
                "Pass the record and all tensors of the same output.",
            )

    # -- nodes

    def _read(self, opened: _Opened) -> _Opened | None:
        """Read the remaining children of a node, up to one that has to be made first; return that one."""
        node, values = opened.node, opened.values
        count = len(node)
        while opened.at < count:
            child = node[opened.at]
            kind = type(child)
            if kind is str or kind is int or kind is bool or child is None:
                values.append(child)
                opened.at += 1
                continue
            if kind is list and len(child) == 2 and child[0] == "float":
                values.append(_decode_float(child[1]))
                opened.at += 1
                continue
            cost = None
            if kind is list and len(child) == 2 and child[0] == "@":
                value = self._refer(child[1])
                cost = self.costs.get(child[1])
            elif kind is list:
                top = opened.node[0] is None
                value = self._open(child, "" if top else inner_prefix(opened.prefix, opened.key()), None)
            elif kind is dict:
                value = self._tensor(child, implied_name(opened.prefix, opened.key()), None)
            else:
                corrupt(f"{_short(child)} is not a node")
            opened.at += 1
            if type(value) is _Opened:
                return value
            self._deliver(opened, value, cost)
        return None

    def _deliver(self, opened: _Opened, value: Any, cost: tuple[int, int] | None) -> None:
        """Give `value` to its parent node; `cost` is that of hashing it, if it is large."""
        if cost:
            elements, depth = cost
            tag = opened.node[0]
            if tag in _HASHING or (tag in _KEYED and (len(opened.values) - _FILLED[tag][1]) % 2 == 0):
                opened.hashed = min(opened.hashed + elements, HASHED + 1)
                if depth > KEY_DEPTH:
                    raise LimitError(
                        f"The structure record has a key nested more than {KEY_DEPTH} levels deep.", DISTRUST
                    )
            else:
                opened.cost = min(opened.cost[0] + elements, HASHED + 1), max(opened.cost[1], depth + 1)
        opened.values.append(value)

    def _refer(self, index: Any) -> Any:
        """Return the value of a node in the table, or that node opened."""
        node = node_at(self.record, index)
        value = self.table[index]
        if value is _UNDER_WAY:
            corrupt(f"node {index} contains itself, which its type does not allow")
        if value is not _UNREAD:
            return value
        if type(node) is list:
            if node[:1] == ["@"]:
                corrupt(f"node {index} of the table is a reference")
            value = self._open(node, "", index)
        elif type(node) is dict:
            value = self._tensor(node, None, index)
        else:
            if not (node is None or type(node) in (str, int, bool)):
                corrupt(f"{_short(node)} is not a node")
            value = node
        if type(value) is int:
            self.costs[index] = value.bit_length() >> 6, 0
        self.table[index] = _UNDER_WAY if type(value) is _Opened else value
        return value

    def _open(self, node: list[Any], prefix: str | None, slot: int | None) -> Any:
        """Return the value of a node, or the node opened if it is made from its children."""
        tag = node[0] if node and type(node[0]) is str else ""
        simple = _VALUES.get(tag)
        if simple:
            parts, make = simple
            expect(len(node) == parts + 1, f"a {tag} has {len(node) - 1} parts instead of {parts}")
            return make(*node[1:])
        if tag == "composite":
            if any(type(part) is dict and "dropped" in part for part in node):
                return _DROPPED
            if self.live_values:
                return _Opened(node, None, prefix, slot)
        if tag in _FILLED:
            target = _FILLED[tag][0](node)
            self.pending.append(_Opened(node, target, prefix, slot))
            return target
        expect(tag in _MADE, f"{_short(node[:1])} does not begin a node")
        parts = _EXACT_PARTS.get(tag, len(node) - 1)
        expect(len(node) - 1 == parts, f"a {tag} has {len(node) - 1} parts instead of {parts}")
        return _Opened(node, None, prefix, slot)

    def _close(self, opened: _Opened) -> Any:
        """Fill or make a node whose children all have values."""
        tag, values = opened.node[0], opened.values
        self.hashed += opened.hashed
        if self.hashed > HASHED:
            raise LimitError("The structure record has keys that would take too long to hash.", DISTRUST)
        if opened.leaf is not None:
            attributes = None if values[0] is _DROPPED else values[0]
            value = self._make_tensor(opened.leaf, opened.prefix, attributes)
        else:
            fields = _FILLED[tag][1] if tag in _FILLED else 0
            if any(value is _DROPPED for value in values):
                values = _without_dropped(values, fields, tag in _KEYED)
            heads, values = values[:fields], values[fields:]
            if opened.target is not None:
                self._fill(opened.target, tag, heads, values)
                return opened.target
            if tag == "frozenset":
                _check_hashes(values)
            maker = _MADE.get(tag)
            value = maker(values) if maker else self._composite(Composite("", {}), heads, values)
            if self.live_values:
                value = self.memory.revived(value)
        if opened.slot is not None:
            self.table[opened.slot] = value
            self.costs[opened.slot] = opened.cost
        return value

    def _fill(self, target: Any, tag: str | None, fields: list[Any], values: list[Any]) -> None:
        if tag in _KEYED:
            keys = values[::2]
            expect(len(values) == 2 * len(keys), f"a {tag} contains a key without a value")
            _check_hashes(keys)
            for key, value in zip(keys, values[1::2], strict=True):
                target[key] = value
            expect(len(target) == len(keys), f"a {tag} contains a key twice")
            if tag in ("odict", "counter") and fields and fields[0] is not None:
                self.attributes.append((target, fields[0]))
        elif tag == "set":
            _check_hashes(values)
            target.update(values)
            expect(len(target) == len(values), "a set contains an element twice")
        elif tag == "opaque":
            expect(2 <= len(values) <= 7, f"an opaque object has {len(values)} parts instead of 2 to 7")
            for name, value in zip(_OPAQUE_PARTS, values, strict=False):
                setattr(target, name, value)
            self.opaques.append(target)
        elif tag == "composite":
            self._composite(target, fields, values)
        else:
            target.extend(values)

    def _composite(self, target: Composite, fields: list[Any], values: list[Any]) -> Composite:
        names = values[::2]
        expect(fields and len(values) == 2 * len(names), "a composite has a part without a name or a value")
        target.kind = _typed(str, *fields, *names)[0]
        expect(target.kind, "a composite has no kind")
        target.parts.update(zip(names, values[1::2], strict=True))
        expect(len(target.parts) == len(names), "a composite has a part twice")
        self.composites.append(target)
        return target

    # -- tensors

    def _tensor(self, leaf: dict[str, Any], implied: str | None, slot: int | None) -> Any:
        """Return a tensor; if it has attributes, return these opened."""
        if "dropped" in leaf:
            return _DROPPED
        if not _LEAF_FIELDS.issuperset(leaf):
            corrupt(f"a tensor has unknown fields: {some(sorted(leaf))}")
        number = leaf.get("is")
        if number is not None:
            if not is_count(number):
                corrupt(f"{_short(number)} is not the number of an object")
            if number in self.tensors:
                return self._again(leaf, implied, number)
        if "attributes" in leaf:
            return _Opened(["tensor", ["@", leaf["attributes"]]], None, implied, slot, leaf)
        return self._make_tensor(leaf, implied, None)

    def _again(self, leaf: dict[str, Any], implied: str | None, number: int) -> Any:
        """Return the tensor that was already read as the same object, perhaps under another name."""
        tensor, description, first = self.tensors[number]
        name = name_of(leaf, implied)
        new = self.flat[name]
        same = _description(leaf) == description and leaves.dtype_name(new) == leaves.dtype_name(first)
        # For lazy tensors, the reader of their bytes compares these.
        same = same and tuple(new.shape) == tuple(first.shape)
        same = same and (isinstance(new, LazyTensor) or self.memory.same(new, first))
        expect(same, f"{name[:100]!r} should be the same object as another tensor, but differs from it")
        self.used.add(name)
        return tensor

    def _make_tensor(self, leaf: dict[str, Any], implied: str | None, attributes: Any) -> Any:
        name = name_of(leaf, implied)
        tensor = self.flat[name]
        if "view" in leaf:
            tensor = viewed_as(untagged(tensor) if isinstance(tensor, LazyTensor) else tensor, leaf["view"])
        kind = self._text(leaf.get("kind", "tensor"))
        expect(kind, "a tensor has no kind")
        expect(kind != "storage" or len(tensor.shape) == 1, "a storage is not flat")
        grad = leaf.get("requires_grad", kind == "parameter")
        expect(type(grad) is bool, "requires_grad is neither true nor false")
        dtype = leaves.dtype_name(tensor)
        if grad and not is_differentiable(dtype):
            corrupt(f"a tensor of {dtype} cannot require gradients")
        if attributes is not None:
            self.described.append((kind, attributes))
        if isinstance(tensor, LazyTensor):
            tensor = untagged(tensor)
            facts = self._facts(leaf, tensor, tensor.dtype.itemsize, kind, grad, attributes)
            tensor = Tagged(tensor, facts) if facts != NO_FACTS else tensor
        elif self.memory.has_elements(tensor):
            facts = self._facts(leaf, tensor, tensor.element_size(), kind, grad, attributes)
            tensor = self.memory.tensor(tensor, facts, name in self.used)
        self.used.add(name)
        if "is" in leaf:
            self.tensors[leaf["is"]] = tensor, _description(leaf), self.flat[name]
        return tensor

    def _facts(
        self, leaf: dict[str, Any], tensor: Any, itemsize: int, kind: str, grad: bool, attributes: Any
    ) -> TensorFacts:
        view = self._view(leaf, tensor, itemsize)
        return TensorFacts(kind, grad, attributes, *(view or (None, 0, 0, _dense(leaf, tensor))))

    def _view(
        self, leaf: dict[str, Any], tensor: Any, itemsize: int
    ) -> tuple[Hashable, int, int, tuple[int, ...]] | None:
        """Return the storage that a tensor shares, its size in bytes, and the tensor's offset and strides there (in
        elements).

        Tensors that were cast since still share it, as a storage of their own dtype.
        """
        if "storage" not in leaf:
            return None
        note = leaf["storage"]
        expect(type(note) is list and 2 <= len(note) <= 3 and all(map(is_count, note[:2])), "a view is not valid")
        if note[0] >= len(self.record.storages):
            corrupt(f"storage {note[0]} does not exist")
        nbytes, dtype = self.record.storages[note[0]]
        dtype = leaf.get("dtype", dtype)
        strides = _strides(note[2], tensor) if len(note) == 3 else contiguous_strides(tensor.shape)
        storage: Hashable = note[0]
        now = leaves.dtype_name(tensor)
        if dtype != now:
            if dtype not in DTYPES:
                return None
            nbytes = nbytes // DTYPES[dtype].itemsize * itemsize
            storage = (note[0], dtype, now)
        reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, strides, strict=True))
        expect(
            0 in tensor.shape or (note[1] + reach + 1) * itemsize <= nbytes,
            f"a tensor extends beyond its storage of {nbytes} bytes",
        )
        return storage, nbytes, note[1], strides

    def _text(self, node: Any) -> str:
        if type(node) is list:
            node = self._refer(node[1]) if len(node) == 2 and node[0] == "@" else self._open(node, None, None)
        return str(*_typed(str, node))

    # -- steps that need the whole tree

    def _finish(self) -> None:
        for kind, attributes in self.described:
            fault = attributes_fault(kind, attributes)
            expect(not fault, f"a tensor has {fault}")
        for composite in self.composites:
            fault = composite_fault(composite.kind, composite.parts)
            expect(not fault, f"a tensor of kind {composite.kind[:100]!r} has {fault}")
        for owner, attributes in self.attributes:
            vars(owner).update(_dict_attributes(type(owner), attributes))
        for opaque in self.opaques:
            _check_opaque(opaque)
        if self.memory:
            self.memory.finish()


def _description(leaf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a tensor object in a record, which is the same at each occurrence."""
    return {key: value for key, value in leaf.items() if key not in ("name", "attributes")}


def _strides(strides: Any, tensor: Any) -> tuple[int, ...]:
    if not (type(strides) is list and len(strides) == len(tensor.shape) and all(map(is_count, strides))):
        corrupt(f"{_short(strides)} are not strides of a tensor of {len(tensor.shape)} dimensions")
    return tuple(strides)


def _dense(leaf: Mapping[str, Any], tensor: Any) -> tuple[int, ...]:
    """Return the recorded strides of a tensor that is alone in its storage; () if there are none."""
    if "strides" not in leaf:
        return ()
    strides = _strides(leaf["strides"], tensor)
    shown = f"the strides {_short(strides)} of a tensor of shape {_short(list(tensor.shape))}"
    expect(leaves.is_dense(tensor.shape, strides), f"{shown} leave gaps or overlap")
    return strides


def _short(value: Any) -> str:
    """Return the beginning of a value, for a message."""
    try:
        return repr(value)[:100]
    except RecursionError:
        return f"a {type(value).__name__}"


def _without_dropped(values: list[Any], fields: int, keyed: bool) -> list[Any]:
    """Return a node's values without tensors that were left out: a dict loses the entry, a sequence has None."""
    if not keyed:
        return [None if value is _DROPPED else value for value in values]
    kept = [None if value is _DROPPED else value for value in values[:fields]]
    for key, value in zip(values[fields::2], values[fields + 1 :: 2], strict=False):
        if key is not _DROPPED and value is not _DROPPED:
            kept += (key, value)
    return kept


def _check_hashes(keys: Sequence[Any]) -> None:
    """Refuse keys chosen to have the same hash, which would make each insertion a linear search."""
    if len(keys) > COLLIDING:
        hashes = Counter(hash(key) for key in keys if type(key) is not str and type(key) is not bytes)
        if hashes and max(hashes.values()) > COLLIDING:
            raise LimitError(
                f"The structure record has more than {COLLIDING} keys with the same hash in one container.", DISTRUST
            )


def _dict_attributes(kind: type, attributes: Any) -> dict[str, Any]:
    """Return the attributes of an OrderedDict or a Counter by name; none may shadow one of its methods."""
    expect(type(attributes) is dict, "attributes are not a dict")
    for name in attributes:
        allowed = type(name) is str and not hasattr(kind, name) and not name.startswith("__")
        expect(allowed, f"{_short(name)} is not an attribute of {kind.__name__}")
    named: dict[str, Any] = attributes
    return named


def _check_opaque(opaque: Opaque) -> None:
    function: Any = opaque
    for _ in range(CALL_DEPTH + 1):
        if type(function) is not Opaque:
            break
        function = function.cls
    expect(type(function) is Global, "an opaque object has no class")
    expect(
        type(opaque.call) is str and opaque.call in _CALLS,
        f"{_short(opaque.call)} is not a known way to construct an object",
    )
    expect(opaque.kwargs is None or type(opaque.kwargs) is dict, "an opaque object has keywords that are not a dict")
    expect(all(type(name) is str for name in opaque.kwargs or ()), "an opaque object has keywords that are not text")
    for part in (opaque.state, opaque.appended, opaque.items):
        expect(type(part) is list, "an opaque object has parts that are not a list")
    expect(all(type(item) is tuple and len(item) == 2 for item in opaque.items), "an opaque object has invalid items")
