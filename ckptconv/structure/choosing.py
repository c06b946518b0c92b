"""Write the structure record of the chosen names of a tree.

Values have names as tensors do: their path. A value goes into the record if its name is chosen, and a container if its
name is chosen or anything in it is kept. A shared object has the name of its first occurrence, but is written whole for
an occurrence that was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from ckptconv.pickles.children import ATOMS
from ckptconv.pickles.nodes import Composite
from ckptconv.structure.choice import Choice
from ckptconv.structure.encoder import COMPOSITE, OPAQUE, Frame, Leaf, RecordEncoder
from ckptconv.structure.forms import ATTRIBUTES, ROOT, Form

# Rules by which values inside a node are chosen: none, by their own names, all that their names do not exclude, or all.
_LEFT_OUT, _BY_NAME, _CHOSEN, _WHOLE = range(4)
# The placeholder, until a node is closed, of a child that was not chosen.
_GONE: Any = object()
# Nodes in which a removed element leaves no gap.
_UNORDERED = frozenset({"set", "frozenset"})


class _ChoosingFrame(Frame):
    """A node being written, and the chosen parts of it."""

    rule = _WHOLE
    owner: tuple[Any, Any] = (None, None)  # where this node is: the list or dict, and the index or key
    kept = lost = False  # whether something in it was chosen, and something was not
    holds = tensors = False  # whether there are chosen tensors in it, and whether any
    pinned = False  # whether there are chosen tensors in its keys

    def take_away(self) -> None:
        """Remove values that were not chosen from the node: mappings and sets lack them, a sequence gets None."""
        node, form = self.out, self.form
        first = len(form.fields) + 1
        if form is ATTRIBUTES or all(child is not _GONE for child in node):
            return
        if form.tag == OPAQUE:
            # The last fields may be missing.
            named = zip(form.fields, node[1:], strict=False)
            empty: dict[str, Any] = {"args": ["tuple"], "kwargs": None}
            node[1:] = [empty.get(field, ["list"]) if child is _GONE else child for field, child in named]
            return
        fields = [None if child is _GONE else child for child in node[1:first]]
        children: Iterable[Any] = node[first:]
        if form.paired and not self.pinned:
            pairs = zip(node[first::2], node[first + 1 :: 2], strict=True)
            children = chain.from_iterable(pair for pair in pairs if pair[1] is not _GONE)
        elif form.tag in _UNORDERED:
            children = (child for child in children if child is not _GONE)
        node[1:] = [*fields, *(None if child is _GONE else child for child in children)]


class ChoosingEncoder(RecordEncoder[_ChoosingFrame]):
    """Writes the names of one tree that are in `choice`; `flat` has all tensors anyway."""

    def __init__(self, choice: Choice, leave_out: Callable[[str, Any], Any] | None, tagged: bool) -> None:
        super().__init__(_ChoosingFrame, leave_out, tagged)
        self.choice = choice
        self.rule = _WHOLE  # of the child that is being opened
        self.holding: set[int] = set()
        # The nodes of the table that were written incomplete, each with the rule that applied.
        self.spoilt: dict[int, int] = {}

    def encode(self, tree: Any) -> Any:
        root = super().encode(tree)
        root, self.nodes, self.storages = _compacted(root, self.nodes, self.storages, self.holding)
        return root

    def _rule(self, frame: _ChoosingFrame, at: int) -> int:
        """Return how values are chosen in child `at` of a frame."""
        if frame.form is ROOT:
            return _BY_NAME if self.choice.include else _CHOSEN
        if frame.rule == _WHOLE or not frame.of_values(at):
            return _WHOLE
        name = frame.prefix + frame.place(at)[0]
        if frame.rule == _LEFT_OUT or self.choice.excludes(name):
            return _LEFT_OUT
        return _CHOSEN if frame.rule == _CHOSEN or self.choice.includes(name) else _BY_NAME

    def _begin(self, frame: _ChoosingFrame, rule: int, owner: tuple[Any, Any]) -> None:
        """Have only chosen strings, numbers and the like written in a new frame."""
        frame.rule, frame.owner = rule, owner
        if rule == _WHOLE:
            return
        children = list(frame.children)
        for at, value in enumerate(children):
            if type(value) in ATOMS and frame.of_values(at):
                if self._rule(frame, at) >= _CHOSEN:
                    frame.kept = True
                else:
                    frame.lost = True
                    children[at] = _GONE
        frame.children = children

    def _open(self, value: Any, frame: _ChoosingFrame, at: int) -> _ChoosingFrame | None:
        if value is _GONE:
            frame.out.append(_GONE)
            return None
        return super()._open(value, frame, at)

    def _node(self, value: Any, form: Form, frame: _ChoosingFrame, at: int) -> _ChoosingFrame | None:
        rule = self.rule = self._rule(frame, at)
        inner = super()._node(value, form, frame, at)
        node = frame.out[-1]
        if inner:
            self._begin(inner, rule, (frame.out, len(frame.out) - 1))
        elif type(node) is not list:
            pass  # it was left out
        elif rule < _CHOSEN:
            frame.lost = True
            frame.out[-1] = _GONE
        else:
            frame.kept |= frame.of_values(at)
            frame.lost |= node[1] in self.spoilt
        return inner

    def _met(self, met: Mapping[str, Any], frame: _ChoosingFrame, index: int | None = None) -> None:
        if self.rule >= _CHOSEN:
            super()._met(met, frame, index)

    def _is_dropped(self, left: Any, name: str, value: Any, frame: _ChoosingFrame) -> bool:
        is_composite, rule = type(value) is Composite, self.rule
        # An object that is listed in `found`, but was itself excluded, is not kept for a tensor in it.
        if left is False or (left is not True and (is_composite or rule != _LEFT_OUT)):
            return False
        # A Composite is a tensor: its own name alone decides.
        if name in self.choice if is_composite or rule == _BY_NAME else rule >= _CHOSEN:
            self.rule = _CHOSEN
            return super()._is_dropped(True, name, value, frame)
        frame.lost = True
        frame.out.append(_GONE)
        return True

    def _refer(self, value: Any, form: Form, identity: Hashable, prefix: str) -> tuple[int, _ChoosingFrame | None]:
        """Do as `RecordEncoder._refer` does, but write an incomplete container again if the rule gives more."""
        index = self.indices.get(identity)
        if index is not None and self.rule > self.spoilt.get(index, self.rule):
            del self.indices[identity]
        return super()._refer(value, form, identity, prefix)

    def _tensor(self, value: Any, frame: _ChoosingFrame, at: int) -> _ChoosingFrame | None:
        leaf = self.leaves[id(value)]
        inner = super()._tensor(value, frame, at)
        self.leaves[id(value)] = leaf  # it may be written again
        return inner

    def _add_tensor(self, node: dict[str, Any], name: str, leaf: Leaf, frame: _ChoosingFrame, at: int) -> None:
        is_value, frame.tensors = frame.of_values(at), True
        if name in self.choice:
            self.rule = _CHOSEN
            frame.holds = True
            frame.pinned |= not is_value
            super()._add_tensor(node, name, leaf, frame, at)
        else:
            self.rule = _LEFT_OUT
            frame.lost = True
            # A "dropped" part shows that the node is incomplete.
            frame.out.append(_GONE if is_value else {"dropped": name})

    def _attributes(self, node: dict[str, Any], name: str, value: Any, frame: _ChoosingFrame) -> _ChoosingFrame | None:
        inner = super()._attributes(node, name, value, frame)
        if inner:
            self._begin(inner, self.rule, (node, "attributes"))
        return inner

    def _close(self, frame: _ChoosingFrame, parent: _ChoosingFrame) -> None:
        if self._is_kept(frame, parent):
            super()._close(frame, parent)

    def _is_kept(self, frame: _ChoosingFrame, parent: _ChoosingFrame) -> bool:
        """Remove values that were not chosen from a written node; return whether the node itself is kept."""
        is_value = parent.of_values(parent.at - 1)
        parent.holds |= frame.holds
        parent.tensors |= frame.tensors
        parent.lost |= frame.lost
        parent.pinned |= frame.holds and not is_value
        tag, rule = frame.form.tag, frame.rule
        if frame.holds and frame.index is not None:
            self.holding.add(frame.index)
        if frame.lost and not frame.tensors and frame.index is not None:
            self.spoilt[frame.index] = rule
        if frame.form is ATTRIBUTES or (tag == COMPOSITE and frame.tensors):
            kept = frame.holds
        elif tag == OPAQUE and frame.lost:
            kept = frame.kept or frame.holds
        else:
            kept = rule >= _CHOSEN or frame.kept or frame.holds or parent.form is ROOT
        if frame.lost:
            frame.take_away()
        if kept:
            # A part of another node is kept with it.
            parent.kept |= is_value
            return True
        parent.lost = True
        owner, key = frame.owner
        if type(owner) is dict:
            del owner[key]
        elif owner is not None:
            owner[key] = _GONE
        return False


def _compacted(
    root: Any, nodes: Sequence[Any], storages: Sequence[Any], pinned: Collection[int]
) -> tuple[Any, list[Any], list[Any]]:
    """Return the parts of a record without nodes and storages that nothing refers to; keep nodes that are `pinned`.

    References are changed in place.
    """
    reached: dict[int, None] = dict.fromkeys(pinned)
    used: dict[int, None] = {}
    references: list[list[Any]] = []
    leaves: list[dict[str, Any]] = []
    stack = [root, *(nodes[index] for index in reached)]
    while stack:
        node = stack.pop()
        indices: list[int] = []
        if type(node) is dict:
            leaves.append(node)
            stack.append(node.get("kind"))
            used.update(dict.fromkeys(node["storage"][:1] if "storage" in node else ()))
            indices = [node["attributes"]] if "attributes" in node else []
        elif type(node) is list and node[0] == "@":
            references.append(node)
            indices = [node[1]]
        elif type(node) is list:
            stack.extend(node)
        for index in indices:
            if index not in reached:
                reached[index] = None
                stack.append(nodes[index])
    places = {index: place for place, index in enumerate(sorted(reached))}
    homes = {index: place for place, index in enumerate(sorted(used))}
    for reference in references:
        reference[1] = places[reference[1]]
    for leaf in leaves:
        if "attributes" in leaf:
            leaf["attributes"] = places[leaf["attributes"]]
        if "storage" in leaf:
            leaf["storage"][0] = homes[leaf["storage"][0]]
    return root, [nodes[index] for index in places], [storages[index] for index in homes]
