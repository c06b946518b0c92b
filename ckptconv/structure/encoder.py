"""Write the structure record of a tree, and name its tensors.

Two passes over the tree: `survey` finds the objects that occur more than once, `encode` writes. Neither recurses, and
both are linear in the size of the tree: a shared object is written once and referred to.

All is written. `choosing` writes a record of chosen names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ckptconv.pickles.children import ATOMS
from ckptconv.pickles.nodes import COMPOSITES, Global, Size
from ckptconv.structure import leaves, parted
from ckptconv.structure.dtype_views import stored
from ckptconv.structure.forms import (
    ATTRIBUTES,
    BIG,
    CONSTANTS,
    FOREIGN,
    FORMS,
    QUANTIZED,
    ROOT,
    Form,
    atom,
    cut,
    float_text,
    has_known_factory,
    words,
)
from ckptconv.structure.record import METADATA, NAMING, NESTED, SHORT, implied_name, inner_prefix
from ckptconv.tensors.lazy import Convert, Handle, LazyTensor, Tagged, TensorFacts, View, facts_of, same_bytes, untagged
from ckptconv.tensors.moves import Conjugate, Negate
from ckptconv.tensors.strides import contiguous_strides, is_contiguous

# Nodes of values and containers.
_HOLDERS = frozenset({"dict", "odict", "counter", "defaultdict", "list", "tuple", "set", "frozenset", "deque"})
# Fields that hold values; all others define the node itself.
_OF_VALUES = frozenset({"attributes", "args", "state", "kwargs", "appended", "items"})
OPAQUE = "opaque"
COMPOSITE = "composite"

# ----------------------------------------------------------------------------------------------------------- writing


def _is_state_dict_metadata(frame: Frame, at: int) -> bool:
    """Return whether child `at` is the attribute that torch sets on every state dict: the versions of its modules."""
    value = frame.children[at]
    if frame.form.tag != "odict" or at or type(value) is not dict or list(value) != ["_metadata"]:
        return False
    modules = value["_metadata"]
    return isinstance(modules, dict) and all(
        type(name) is str and type(facts) is dict and all(key == "version" for key in facts)
        and all(type(version) in (int, type(None)) for version in facts.values())
        for name, facts in modules.items()
    )  # fmt: skip


class Leaf:
    """A tensor object of the tree: `bare` is its bytes, `facts` everything else; `count` is how often it occurs."""

    __slots__ = ("bare", "count", "facts", "group", "number")

    def __init__(self, bare: Any, facts: TensorFacts, group: Hashable) -> None:
        self.bare = bare
        self.facts = facts
        self.group = group  # the key shared by the tensors of its storage
        self.count = 0
        self.number: int | None = None

    @property
    def storage_nbytes(self) -> int:
        """The size of its storage, as far as this tensor shows."""
        nbytes: int = self.facts.storage_nbytes or self.bare.nbytes
        return nbytes


class Frame:
    """A node being written: its JSON array, the children still to write, and the names of tensors in it.

    `prefix` begins the names of tensors inside; `implied` is the prefix that a reader derives, None if it cannot.
    """

    __slots__ = (
        "at", "children", "depth", "form", "implied", "index", "inert", "met", "out", "prefix", "silent", "uncastable",
        "valued",
    )  # fmt: skip

    def __init__(
        self, out: list[Any], children: Sequence[Any], form: Form, prefix: str, implied: str | None, depth: int
    ) -> None:
        self.out = out
        self.children = children
        self.form = form
        self.prefix = prefix
        self.implied = implied if form.tag in NAMING else None
        self.depth = depth
        self.at = 0
        self.index: int | None = None  # of the node, if it is in the table
        self.met: Mapping[str, Any] = {}  # objects to list in `found`, if this is kept
        self.inert = form.tag == OPAQUE  # whether this is inside an object known by name only
        # Whether this is inside a tensor whose parts mean nothing alone: a quantized one, or one of another class.
        self.uncastable = form.tag == COMPOSITE and (children[0] == QUANTIZED or children[0] not in COMPOSITES)
        self.silent = False  # whether its values are not worth listing
        self.valued = False  # whether there are values in it

    def of_values(self, at: int) -> bool:
        """Return whether child `at` is a value of this node, which may be removed, not a part that defines it."""
        form = self.form
        if at < len(form.fields):
            return form.fields[at] in _OF_VALUES
        if form.tag == COMPOSITE:
            return (at - 1) % 2 == 1 and self.children[at - 1] == "attributes"
        if form.paired:
            return (at - len(form.fields)) % 2 == 1
        return form.tag in _HOLDERS or form is ROOT

    def values(self) -> Iterator[int]:
        """Yield the indices of the strings, numbers and the like that are values in this node."""
        form = self.form
        if form.tag in _HOLDERS:
            for at in range(len(form.fields) + form.paired, len(self.children), 1 + form.paired):
                value = self.children[at]
                if type(value) in ATOMS and value is not None:
                    yield at

    def place(self, at: int) -> tuple[str, Any]:
        """Return child `at`'s part of a name, and the key or index that tensors may be named after, if any."""
        fields = self.form.fields
        if at < len(fields):
            return fields[at], None
        index = at - len(fields)
        if not self.form.paired:
            return str(index), index
        if index % 2 == 0:
            return f"keys.{index // 2}", None
        key = self.children[at - 1]
        return words(key, whole=not self.prefix), key


FrameT = TypeVar("FrameT", bound=Frame)


class RecordEncoder(Generic[FrameT]):
    """Writes one tree, in two passes: `survey` finds the objects that occur more than once, `encode` writes.

    `leave_out` is called with the name that a tensor in its place would have, and each `Opaque`, `Global` and
    `Composite`. It returns True to leave that out, False to write it, or a replacement to write: the object itself, or
    a container of its content. The dict `found` has, by name, the objects that were chosen and not simply written.
    `uncastable` are the names of tensors that must not be cast: parts of complex numbers, of quantized tensors, and of
    those of other classes. `quantized` are those that their library's metadata describes. `tagged` keeps lazy tensors
    tagged with their facts.

    `values` are the top-level keys that lead to values in the record. `foreign`: it has objects known by name only.
    `outside`: it has a tensor that is not part of one.
    """

    def __init__(
        self, frames: type[FrameT], leave_out: Callable[[str, Any], Any] | None = None, tagged: bool = False
    ) -> None:
        self.frames = frames
        self.leave_out = leave_out
        self.tagged = tagged
        self.found: dict[str, Any] = {}
        self.outside = False
        self.foreign = False
        self.top: FrameT | None = None
        self.valued_at: set[int] = set()
        self.valued_nodes: set[int] = set()
        self.flat: dict[str, Any] = {}
        self.uncastable: set[str] = set()
        self.quantized: dict[str, parted.PartedTensor] = {}
        self.nodes: list[Any] = []
        self.storages: list[list[Any]] = []
        self.indices: dict[Hashable, int] = {}
        self.repeated: set[Hashable] = set()
        self.leaves: dict[int, Leaf] = {}
        # Of each storage its first tensor, and the size of those that several tensors share.
        self.firsts: dict[Hashable, Leaf] = {}
        self.shared: dict[Hashable, int] = {}
        self.groups: dict[Hashable, int] = {}
        self.numbers = 0
        self.suffixes: dict[str, int] = {}
        # Live objects with the nodes that stand for them. Both are kept, so that no id is reused.
        self.stand_ins: dict[int, tuple[Any, Any]] = {}

    # -- first pass

    def survey(self, tree: Any) -> None:
        """Find the objects that the tree holds more than once: containers, tensors, storages and long strings."""
        seen: set[Hashable] = set()
        repeated = self.repeated
        stack = [tree]
        while stack:
            value = stack.pop()
            kind = type(value)
            if kind in ATOMS:
                key = self._atom_key(value)
                if key is None:
                    continue
                if key in seen:
                    repeated.add(key)
                seen.add(key)
                continue
            form = FORMS.get(kind)
            if form is None or kind is defaultdict:
                leaf = self._leaf(value)
                if leaf is not None:
                    if leaf.count == 1:
                        stack.append(leaf.facts.attributes)
                    continue
                value, form = self._stand_in(value)
                kind = type(value)
            key = self._key(value)
            if key is not None:
                if key in seen:
                    repeated.add(key)
                    continue
                seen.add(key)
            stack.extend(form.children(value))
        self.firsts.clear()

    def _leaf(self, value: Any) -> Leaf | None:
        """Count an occurrence of a tensor, and return it; None for any other object."""
        leaf = self.leaves.get(id(value))
        if leaf is None:
            taken = self._taken(value)
            if taken is None:
                return None
            bare, facts, group = taken
            leaf = self.leaves[id(value)] = Leaf(bare, facts, group)
            first = leaf if group is None else self.firsts.setdefault(group, leaf)
            if first is not leaf:
                self.shared[group] = max(self.shared.get(group, first.storage_nbytes), leaf.storage_nbytes)
        leaf.count += 1
        return leaf

    @staticmethod
    def _taken(value: Any) -> tuple[Any, TensorFacts, Hashable] | None:
        """Return the bytes of a tensor, the facts about it, and the key of its storage; None for any other object."""
        if isinstance(value, (LazyTensor, Handle)):
            tensor = value.lazy if isinstance(value, Handle) else value
            bare, facts = untagged(tensor), facts_of(tensor)
            return bare, facts, _storage_group(bare, facts)
        taken = None if type(value) is defaultdict else leaves.live("tensors", value).taken(value)
        return taken and (*taken, taken[1].storage)

    def _stand_in(self, value: Any) -> tuple[Any, Form]:
        """Return the node that stands for a live object, and its form."""
        if type(value) is defaultdict and has_known_factory(value):
            return value, FORMS[defaultdict]
        known = self.stand_ins.get(id(value))
        if known is None:
            known = self.stand_ins[id(value)] = (value, leaves.live("objects", value).inert(value))
        return known[1], FORMS[type(known[1])]

    @staticmethod
    def _atom_key(value: Any) -> Hashable:
        """Return the identity of a long string, bytes or integer; None for a short one."""
        kind = type(value)
        if kind is str or kind is bytes:
            long: Hashable = value if len(value) > SHORT else None
            return long
        if kind is int and not -BIG < value < BIG:
            return id(value)
        return None

    @staticmethod
    def _key(value: Any) -> Hashable:
        """Return the identity of a container; None if it has none."""
        kind = type(value)
        if kind is Global:
            return (Global, *value)
        if kind in CONSTANTS or (kind in (tuple, frozenset, Size) and not value):
            return None
        return id(value)

    # -- second pass

    def encode(self, tree: Any) -> Any:
        """Return the node of the tree. Fill `flat`, `nodes` and `storages` in the order of the tree."""
        top: list[Any] = []
        stack = [self.frames(top, (tree,), ROOT, "", None, 0)]
        while stack:
            frame = stack[-1]
            out, children = frame.out, frame.children
            for at in range(frame.at, len(children)):
                value = children[at]
                kind = type(value)
                if kind is str:
                    out.append(value if len(value) <= SHORT and value.isascii() else self._atom(value))
                elif kind is float:
                    out.append(["float", float_text(value)])
                elif kind in ATOMS:
                    out.append(self._atom(value))
                else:
                    frame.at = at + 1
                    inner = self._open(value, frame, at)
                    if inner:
                        stack.append(inner)
                        if len(stack) == 2:
                            self.top = inner
                        break
            else:
                stack.pop()
                if stack:
                    self._close(frame, stack[-1])
        return top[0]

    def values(self) -> tuple[str, ...]:
        """Return the top-level keys of the tree that lead to values in the record."""
        return tuple(self.top.place(at)[0] for at in sorted(self.valued_at)) if self.top else ()

    def _close(self, frame: FrameT, parent: FrameT) -> None:
        """Add the content of a frame's written node to its parent."""
        form = frame.form
        if frame is self.top:
            self.valued_at.update(frame.values())
        elif frame.silent:
            frame.valued = False
        elif not frame.valued:
            is_value = form.tag not in _HOLDERS and form.tag != COMPOSITE and form is not ATTRIBUTES
            frame.valued = is_value or any(True for _ in frame.values())
        self.found.update(frame.met)
        self.foreign |= form.tag == OPAQUE
        if frame.valued:
            if frame.index is not None:
                self.valued_nodes.add(frame.index)
            self._mark(parent)

    def _mark(self, frame: FrameT) -> None:
        """Record that the child opened last in a frame contains values."""
        frame.valued = True
        if frame is self.top:
            self.valued_at.add(frame.at - 1)

    def _met(self, met: Mapping[str, Any], frame: FrameT, index: int | None = None) -> None:
        """Note the objects found in a frame's child, whose node may be one of the table, written before."""
        self.found.update(met)
        if index in self.valued_nodes:
            self._mark(frame)

    def _atom(self, value: Any) -> Any:
        key = self._atom_key(value)
        if key is None or key not in self.repeated:
            return atom(value)
        index = self.indices.get(key)
        if index is None:
            index = self.indices[key] = len(self.nodes)
            self.nodes.append(atom(value))
        return ["@", index]

    def _open(self, value: Any, frame: FrameT, at: int) -> FrameT | None:
        """Write child `at` of `frame`; return a frame for its contents if these are still to be written."""
        form = FORMS.get(type(value))
        if form is None or type(value) is defaultdict:
            if id(value) in self.leaves:
                return self._tensor(value, frame, at)
            value, form = self._stand_in(value)
        return self._node(value, form, frame, at)

    def _node(self, value: Any, form: Form, frame: FrameT, at: int) -> FrameT | None:
        """Write an object other than a tensor, child `at` of `frame`; return a frame for its contents, as above."""
        text, key = frame.place(at)
        identity = self._key(value)
        met: Mapping[str, Any] = {}
        if self.leave_out and type(value) in FOREIGN:
            name = frame.prefix + text if frame.form is not ROOT else "tensor"
            left = self.leave_out(name, value)
            if self._is_dropped(left, name, value, frame):
                return None
            if left is not False:
                # The entry of an object covers its class.
                met = {} if frame.form.tag == OPAQUE and at == 0 else {name: value}
                value, form = left, FORMS[type(left)]
        prefix, implied = self._prefix(frame, text), inner_prefix(frame.implied, key)
        if frame.form is ROOT:
            prefix = implied = ""
        if frame.depth >= NESTED or identity in self.repeated:
            index, inner = self._refer(value, form, identity, prefix)
            frame.out.append(["@", index])
            if inner is None:
                self._met(met, frame, index)
                return None
        else:
            node: list[Any] = [form.tag]
            frame.out.append(node)
            inner = self.frames(node, form.children(value), form, prefix, implied, frame.depth + 1)
        inner.met = met
        inner.inert |= frame.inert
        inner.uncastable |= frame.uncastable
        inner.silent = not frame.of_values(at) or (form is FORMS[dict] and _is_state_dict_metadata(frame, at))
        return inner

    def _is_dropped(self, left: Any, name: str, value: Any, frame: FrameT) -> bool:
        """Write that an object was left out, if `leave_out` returned so (`left`); return whether it was."""
        if left is not True:
            return False
        self._met({name: value}, frame)
        frame.out.append({"dropped": name})
        return True

    def _prefix(self, frame: FrameT, text: str) -> str:
        """Return the prefix of the names of tensors inside a child of `frame` with this part of a name."""
        kind = frame.children[0] if frame.form.tag == COMPOSITE and text == "attributes" else None
        parting = None if kind is None else parted.of_class(str(kind))
        if parting:
            name = frame.prefix[:-1]
            parts = parting.described(str(kind), dict(zip(frame.children[1::2], frame.children[2::2], strict=True)))
            if parts:
                self.quantized[name] = parts
            return parted.prefix_of(name)
        return cut(frame.prefix + text) + "."

    def _refer(self, value: Any, form: Form, identity: Hashable, prefix: str) -> tuple[int, FrameT | None]:
        """Return the index of a container in the table, and a frame for its contents if it was not there."""
        index = self.indices.get(identity) if identity is not None else None
        if index is not None:
            return index, None
        index = len(self.nodes)
        if identity is not None:
            self.indices[identity] = index
        node: list[Any] = [form.tag]
        self.nodes.append(node)
        frame = self.frames(node, form.children(value), form, prefix, "", 1)
        frame.index = index
        return index, frame

    def _tensor(self, value: Any, frame: FrameT, at: int) -> FrameT | None:
        """Write a tensor, child `at` of `frame`; return a frame for its attributes, if it has any."""
        leaf = self.leaves[id(value)]
        if leaf.count == 1:
            del self.leaves[id(value)]  # it is written once, and there may be a million
        facts = leaf.facts
        text, key = frame.place(at)
        if frame.form is ROOT:
            text = "tensor"
        name = self._unique(frame.prefix + text)
        bits = stored(leaf.bare)
        self.flat[name] = Tagged(bits, facts) if self.tagged else bits
        node: dict[str, Any] = {}
        if name != implied_name(frame.implied, key):
            node["name"] = name
        if bits is not leaf.bare:
            node["view"] = leaves.dtype_name(leaf.bare)
        if bits is not leaf.bare or frame.uncastable:
            self.uncastable.add(name)
        if facts.kind != "tensor":
            node["kind"] = self._atom(facts.kind)
        if facts.requires_grad != (facts.kind == "parameter"):
            node["requires_grad"] = facts.requires_grad
        self._add_tensor(node, name, leaf, frame, at)
        return self._attributes(node, name, facts.attributes, frame) if facts.attributes is not None else None

    def _add_tensor(self, node: dict[str, Any], name: str, leaf: Leaf, frame: FrameT, at: int) -> None:
        """Add the node of a tensor as child `at` of `frame`, and how it shares memory."""
        self.outside |= not frame.inert
        frame.out.append(node)
        if leaf.count > 1:
            if leaf.number is None:
                leaf.number = self.numbers
                self.numbers += 1
            node["is"] = leaf.number
        self._note_storage(node, leaf)

    def _attributes(self, node: dict[str, Any], name: str, value: Any, frame: FrameT) -> FrameT | None:
        """Write the attributes of a tensor of `frame` in the table; return a frame for contents not yet written."""
        met: Mapping[str, Any] = {}
        if self.leave_out and type(value) in FOREIGN:
            place = f"{name}.attributes"
            left = self.leave_out(place, value)
            if left is True:
                self._met({place: value}, frame)
                return None
            if left is not False:
                met, value = {place: value}, left
        inner: FrameT | None = None
        prefix, index = cut(name) + ".", len(self.nodes)
        if type(value) in ATOMS:
            self.nodes.append(atom(value))
            self.valued_nodes.add(index)
        elif id(value) in self.leaves:
            inner = self.frames(self.nodes, (value,), ATTRIBUTES, prefix, None, 0)
        else:
            form = FORMS.get(type(value))
            if form is None or type(value) is defaultdict:
                value, form = self._stand_in(value)
            index, inner = self._refer(value, form, self._key(value), prefix)
        node["attributes"] = index
        if inner:
            inner.inert |= frame.inert
            inner.met = met
        else:
            self._met(met, frame, index)
        return inner

    def _note_storage(self, node: dict[str, Any], leaf: Leaf) -> None:
        """Write how a tensor shares memory with others; if it does not, only an unusual order of dimensions."""
        facts, shape = leaf.facts, tuple(leaf.bare.shape)
        strides = facts.strides if len(facts.strides) == len(shape) else contiguous_strides(shape)
        contiguous = is_contiguous(shape, strides)
        if leaf.group not in self.shared:
            if not contiguous and leaves.is_dense(shape, strides):
                node["strides"] = list(strides)
            return
        dtype = leaves.dtype_name(leaf.bare)
        group = self.groups.get(leaf.group)
        if group is None:
            group = self.groups[leaf.group] = len(self.storages)
            self.storages.append([self.shared[leaf.group], dtype])
        node["storage"] = [group, facts.storage_offset] + ([] if contiguous else [list(strides)])
        if dtype != self.storages[group][1]:
            node["dtype"] = dtype

    def _unique(self, name: str) -> str:
        """Return `name`; if it is taken, `name` with the first number that makes it unique."""
        if name not in self.flat and name != METADATA:
            return name
        number = self.suffixes.get(name, 2)
        while f"{name}~{number}" in self.flat:
            number += 1
        self.suffixes[name] = number + 1
        return f"{name}~{number}"


def _storage_group(tensor: LazyTensor, facts: TensorFacts) -> Hashable:
    """Return the key that a lazy tensor shares with those in the same storage; None for one that shares nothing."""
    if facts.storage is None:
        key = same_bytes(tensor)
        return None if key is None else ("bytes", key)
    inner = tensor
    while isinstance(inner, (View, Convert)):
        # With the sign flipped, its values are no longer those in the storage.
        if isinstance(inner, Convert) and isinstance(inner.kernel, (Negate, Conjugate)):
            return None
        inner = inner.tensor
    return ("storage", facts.storage) if tensor.numel else None
