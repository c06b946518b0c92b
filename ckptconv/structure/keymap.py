"""The key mapper: a state dict as named tensors and one JSON record, and back again exactly.

`flatten` gives each tensor of a tree a readable name, and describes the tree itself (containers, keys, plain values) in
the structure record: data that is never executed. `unflatten` puts the tensors back. Trees may be deep, cyclic, or
share anything. Pure: no tensor data is read, and nothing that a record names is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise, repeat, starmap
from operator import attrgetter, lt
from typing import TYPE_CHECKING, Any

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.structure import leaves
from ckptconv.structure.record import METADATA, Flattened, StructureRecord, dump, parse, plain_record, remap
from ckptconv.tensors.dtypes import DTYPE_RANK
from ckptconv.tensors.lazy import NO_FACTS, LazyTensor, Stored, Tagged, TensorFacts, untagged
from ckptconv.text import brief

if TYPE_CHECKING:
    from ckptconv.structure.choice import Choice

__all__ = ["describe", "flatten", "flatten_states", "unflatten"]

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
