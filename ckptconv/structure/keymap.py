"""The key mapper: a state dict as named tensors and one JSON record, and back again exactly.

`flatten` gives each tensor of a tree a readable name, and describes the tree itself (containers, keys, plain values) in
the structure record: data that is never executed. `unflatten` puts the tensors back. Trees may be deep, cyclic, or
share anything. Pure: no tensor data is read, and nothing that a record names is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, repeat, starmap
from operator import attrgetter, lt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.structure import leaves
from ckptconv.structure.record import METADATA, StructureRecord, dump, name_of, parse, tensors_of
from ckptconv.tensors.dtypes import DTYPE_RANK
from ckptconv.tensors.lazy import NO_FACTS, LazyTensor, Stored, Tagged, TensorFacts, untagged
from ckptconv.text import brief

if TYPE_CHECKING:
    from ckptconv.structure.choice import Choice
    from ckptconv.structure.parted import PartedTensor

__all__ = [
    "Flattened", "claimed_equal", "classes", "describe", "flatten", "flatten_states", "names", "plain_record", "remap",
    "unflatten",
]  # fmt: skip


class Flattened(NamedTuple):
    """A tree as tensors by name, in its order, and its structure record; None if it needs none.

    `uncastable` are names of tensors that must not be cast, as their values mean nothing alone: parts of complex
    numbers stored as pairs, of quantized tensors, and of those of other classes. `owns_storage`: no two tensors share
    bytes. `values` are the top-level keys that lead to values in the record, other than tensors and the versions of a
    state dict. `inert`: the record has objects known by name only, and no tensor outside them. `found` are, by name,
    chosen objects that were left out or replaced. `quantized` are the tensors that are stored in parts, by name.
    """

    tensors: dict[str, Any]
    structure: str | None
    uncastable: frozenset[str]
    owns_storage: bool = False
    values: tuple[str, ...] = ()
    inert: bool = False
    found: Mapping[str, Any] = MappingProxyType({})
    quantized: Mapping[str, PartedTensor] = MappingProxyType({})


_TENSOR, _FACTS, _PLACE = attrgetter("tensor"), attrgetter("facts"), attrgetter("file.path", "offset")


def flatten(tree: Any, *, keep_order: bool = True) -> tuple[dict[str, Any], str | None]:
    """Return `tree` as {name: tensor} in the order of the tree, and its structure record.

    The record is None if `unflatten(flat, None)` returns exactly the same tree once `flat` has been through a
    safetensors file: a dict of strings to ordinary tensors, in file order, or in any order if `keep_order` is false.
    `LazyTensor`s are returned untagged. torch tensors are returned detached, sharing their memory. Live torch and numpy
    values are recorded as the nodes that stand for them; objects of other classes as `Opaque`, made from what pickle
    would write. Tensors of a dtype that safetensors lacks are returned as the same bits in another, complex ones as
    pairs. Raise UsageError for an object without such a form.

    Examples:
        >>> flat, structure = ckptconv.flatten({"layers": [torch.ones(2), torch.zeros(3)], "step": 7})
        >>> list(flat)
        ['layers.0', 'layers.1']
    """
    described = describe(tree, keep_order=keep_order)
    return described.tensors, described.structure


def flatten_states(states: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> Flattened:
    """Return an optimizer's `states` by parameter, and its param_groups, as tensors by name, and their structure
    record.

    The names are <parameter>.<state> for every format. The record has torch's own nesting, {"state": …, "param_groups":
    …}. Raise UnsupportedError if this gives two tensors one name.
    """
    described = describe({"state": states, "param_groups": groups})
    flat = described.tensors
    names = {name: name.removeprefix("state.") for name in flat}
    if len(set(names.values())) < len(names):
        odd = next(name for name, new in names.items() if name != new and new in flat)
        raise UnsupportedError(f"A state of the optimizer and an entry of its groups are both named {names[odd]!r}.")
    return described._replace(
        tensors={names[name]: tensor for name, tensor in flat.items()},
        structure=remap(described.structure, names),
        uncastable=frozenset(names[name] for name in described.uncastable),
    )


def describe(
    tree: Any,
    *,
    keep_order: bool = True,
    leave_out: Callable[[str, Any], Any] | None = None,
    tagged: bool = False,
    choice: Choice | None = None,
) -> Flattened:
    """Return the result of `flatten`, and more. `tagged` keeps lazy tensors tagged with their facts.

    `leave_out` is called with the name that a tensor in its place would have, and each `Opaque`, `Global` and
    `Composite`. It returns True to leave that out, False to keep it, or a replacement to write and list in `found`: the
    object itself, or a container of its content. `choice` says which tensors and values the record has. A dict lacks
    the keys of those not chosen; a sequence has None in their place. The result has all tensors.
    """
    choice = choice or None
    plain = plain_tensors(tree, tagged)
    if plain is not None:
        kept = plain if choice is None else {name: tensor for name, tensor in plain.items() if name in choice}
        in_order = not keep_order or _in_file_order(kept)
        return Flattened(plain, None if in_order else plain_record(kept), frozenset(), owns_storage=True)
    from ckptconv.structure.encoder import RecordEncoder  # most need none

    encoder = RecordEncoder(leave_out, tagged, choice)
    encoder.survey(tree)
    root = encoder.encode(tree)
    flat, uncastable = encoder.flat, frozenset(encoder.uncastable)
    kept = flat if choice is None else {name: tensor for name, tensor in flat.items() if name in choice}
    inert = encoder.foreign and not encoder.outside
    if type(tree) is dict and not encoder.nodes and _is_plain(root) and (not keep_order or _in_file_order(kept)):
        return Flattened(flat, None, uncastable, inert=inert, found=encoder.found)
    record = dump(root, encoder.nodes, encoder.storages)
    return Flattened(flat, record, uncastable, False, encoder.values(), inert, encoder.found, encoder.quantized)


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
        raise UsageError(f"unflatten takes a mapping and text, not {brief(flat)} and {brief(structure)}.")
    if structure is None:
        return dict(flat)
    if live_values is None:
        live_values = leaves.is_imported() and not any(isinstance(leaf, LazyTensor) for leaf in flat.values())
    record = parse(structure)
    plain = plain_dict(record, flat)
    if plain is not None:
        return plain
    from ckptconv.structure.decoder import RecordDecoder  # most need none

    return RecordDecoder(record, flat, live_values, lay_out).tree()


def claimed_equal(flat: Mapping[str, Any], structure: str | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield each further name that a record gives to one object: (name, the tensor that `unflatten` uses, its own
    tensor).

    Raise CorruptError for a malformed record.
    """
    if structure is None or '"is"' not in structure:
        return
    first: dict[int, str] = {}
    for leaf, implied in tensors_of(parse(structure)):
        if "dropped" not in leaf and type(leaf.get("is")) is int:
            name = name_of(leaf, implied)
            known = first.setdefault(leaf["is"], name)
            if known != name and known in flat and name in flat:
                yield name, flat[known], flat[name]


def remap(structure: str | None, renames: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> str | None:
    """Return the record for renamed tensors: first apply `renames` {old: new}, then `aliases` {removed: kept} to the
    new names. Names in neither stay.

    Keys of the tree are not names, and stay. None stays None: a plain dict under new names is a plain dict; call
    `plain_record` first to keep its keys. Raise CorruptError for a malformed record.
    """
    if structure is None or not (aliases or any(old != new for old, new in renames.items())):
        return structure
    record = parse(structure)
    for leaf, implied in tensors_of(record):
        if "dropped" in leaf:
            continue
        old = name_of(leaf, implied)
        new = renames.get(old, old)
        facts = {key: value for key, value in leaf.items() if key != "name"}
        leaf.clear()
        new = (aliases or {}).get(new, new)
        if new != implied:
            leaf["name"] = new
        leaf.update(facts)
    return dump(record.root, record.nodes, record.storages)


def classes(structure: str | None) -> frozenset[str]:
    """Return the classes and functions that a record names, those of tensors included."""
    if structure is None:
        return frozenset()
    record = parse(structure)
    kinds = {str(leaf["kind"]) for leaf, _ in tensors_of(record) if "kind" in leaf}
    stack = [record.root, *record.nodes]
    while stack:
        node = stack.pop()
        if type(node) is list and node[:1] == ["global"]:
            kinds.add(".".join(map(str, node[1:])))
        elif type(node) is list:
            stack.extend(node)
    return frozenset(kinds.union(node for node in record.nodes if type(node) is str))


def names(structure: str) -> frozenset[str]:
    """Return the names that a record has for tensors."""
    return frozenset(name_of(leaf, implied) for leaf, implied in tensors_of(parse(structure)) if "dropped" not in leaf)


def plain_record(names: Iterable[str]) -> str:
    """Return the record of a plain dict of tensors with these keys, in this order."""
    return dump(["dict", *chain.from_iterable(zip(names, repeat({})))], [], [])


def plain_tensors(tree: Any, tagged: bool) -> dict[str, Any] | None:
    """Return the tensors of the most common state dict: ordinary ones, lazy or torch's, each alone in its storage, with
    ASCII names.

    Such a tree needs neither a survey nor, in file order, a record. Tensors without facts, as of safetensors, are alone
    if none begins where another does. Return None for any other tree.
    """
    if type(tree) is not dict or {*map(type, tree)} - {str} or METADATA in tree or not all(map(str.isascii, tree)):
        return None
    # There may be a million: each step goes over all of them.
    tensors: list[Any] = list(tree.values())
    facts: list[TensorFacts] = []
    kinds = {*map(type, tensors)}
    if kinds == {Tagged}:
        facts, tensors = [*map(_FACTS, tensors)], [*map(_TENSOR, tensors)]
    elif kinds != {Stored}:
        if not all(map(leaves.is_ordinary, tensors)):
            return None
        pairs = [*map(leaves.bare, tensors)]
        facts, tensors = [fact_of for _, fact_of in pairs], [tensor for tensor, _ in pairs]
    if not (kinds - {Tagged, Stored} or _are_dense(tensors)):
        return None
    storages = {fact.storage for fact in facts} if facts else {*map(_PLACE, tensors)}
    if len(storages) < len(tensors) or None in storages:
        return None
    if any(fact.requires_grad or fact.attributes is not None or fact.kind != "tensor" for fact in facts):
        return None
    return dict(zip(tree, map(Tagged, tensors, facts or repeat(NO_FACTS)) if tagged else tensors, strict=False))


def plain_dict(record: StructureRecord, flat: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tree of a record that has the order of tensors by their names and nothing else, as that of
    `plain_record`, and of lazy tensors; None if the record is another, or does not fit."""
    root, nodes, storages = record
    if nodes or storages or type(root) is not list or root[:1] != ["dict"] or len(root) % 2 == 0:
        return None
    names, leaves = root[1::2], root[2::2]
    if {*map(type, names)} - {str} or {*map(type, leaves)} - {dict} or any(leaves):
        return None
    if len({*names}) < len(names) or flat.keys() != {*names}:
        return None
    if not all(issubclass(kind, LazyTensor) for kind in {*map(type, flat.values())}):
        return None
    return {name: untagged(flat[name]) for name in names}


def _are_dense(tensors: Sequence[Any]) -> bool:
    """Whether all are stored contiguously, with a dtype that safetensors has."""
    if {*map(type, tensors)} - {Stored}:
        return False
    dtype = shape = strides = None
    for tensor in tensors:
        # Most share these with the one before.
        if tensor.shape is shape and tensor.strides is strides and tensor.dtype is dtype:
            continue
        dtype, shape, strides = tensor.dtype, tensor.shape, tensor.strides
        if dtype.code is None or not tensor.contiguous:
            return False
    return True


def _is_plain(root: Sequence[Any]) -> bool:
    return all(type(key) is str for key in islice(root, 1, None, 2)) and all(
        value == {} for value in islice(root, 2, None, 2)
    )


def _in_file_order(flat: Mapping[str, Any]) -> bool:
    ranks = (-DTYPE_RANK.get(leaves.dtype_name(tensor), -1) for tensor in flat.values())
    return all(starmap(lt, pairwise(zip(ranks, flat, strict=True))))
