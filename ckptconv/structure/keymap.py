"""The key mapper: a state dict as named tensors and one JSON record.

`flatten` gives each tensor of a tree a readable name, and describes the tree itself (containers, keys, plain values) in
the structure record: data that is never executed. Trees may be deep, cyclic, or share anything. Pure: no tensor data is
read. The way back is a feature, `unflattening`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise, starmap
from operator import lt
from typing import TYPE_CHECKING, Any

from ckptconv.structure import leaves
from ckptconv.structure.encoder import Frame, RecordEncoder
from ckptconv.structure.record import Flattened, dump
from ckptconv.tensors.dtypes import DTYPE_RANK

if TYPE_CHECKING:
    from ckptconv.structure.choice import Choice


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
    encoder: RecordEncoder[Any] = RecordEncoder(Frame, leave_out, tagged)
    if choice:
        from ckptconv.structure.choosing import ChoosingEncoder

        encoder = ChoosingEncoder(choice, leave_out, tagged)
    encoder.survey(tree)
    root = encoder.encode(tree)
    flat, uncastable = encoder.flat, frozenset(encoder.uncastable)
    kept = {name: tensor for name, tensor in flat.items() if name in choice} if choice else flat
    inert = encoder.foreign and not encoder.outside
    if type(tree) is dict and not encoder.nodes and _is_plain(root) and (not keep_order or _in_file_order(kept)):
        return Flattened(flat, None, uncastable, inert=inert, found=encoder.found)
    record = dump(root, encoder.nodes, encoder.storages)
    return Flattened(flat, record, uncastable, encoder.values(), inert, encoder.found, encoder.quantized)


def _is_plain(root: Sequence[Any]) -> bool:
    return all(type(key) is str for key in islice(root, 1, None, 2)) and all(
        value == {} for value in islice(root, 2, None, 2)
    )


def _in_file_order(flat: Mapping[str, Any]) -> bool:
    ranks = (-DTYPE_RANK.get(leaves.dtype_name(tensor), -1) for tensor in flat.values())
    return all(starmap(lt, pairwise(zip(ranks, flat, strict=True))))


def remap(structure: str | None, renames: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> str | None:
    """Return the record for renamed tensors: first apply `renames` {old: new}, then `aliases` {removed: kept} to the
    new names. Names in neither stay.

    Keys of the tree are not names, and stay; None stays None. Raise CorruptError for a malformed record.
    """
    if structure is None or not (aliases or any(old != new for old, new in renames.items())):
        return structure
    from ckptconv.structure.reading import name_of, parse, tensors_of

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
