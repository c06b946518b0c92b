"""The optimizer states of parameters, cut out of the states of the ranks as the weights are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.deepspeed import partitions as zero_layout
from ckptconv.features.deepspeed.cuts import Group, GroupCut
from ckptconv.features.deepspeed.records import OptimFile, misfit
from ckptconv.features.deepspeed.weights import Weights
from ckptconv.tensors.lazy import Inline, LazyTensor, View, untagged


def own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with tensors of its own: a step counter that several share must not tie them."""
    return {
        key: View(untagged(value), value.dtype, value.shape) if isinstance(value, LazyTensor) else value
        for key, value in state.items()
    }


def read_states(weights: Weights, groups: Sequence[Group], optims: Sequence[OptimFile]) -> None:
    """Cut every state as the weights are cut.

    Only a tensor as long as a partition is cut; a single value belongs to each parameter of the group. Muon's states
    are those of whole parameters, unless they are offloaded.
    """
    first = optims[0]
    for number, group in enumerate(groups):
        if number >= len(first.states) or not first.states[number]:
            continue
        partitioned, common, odd = [], {}, []
        for key, value in first.states[number].items():
            if not isinstance(value, LazyTensor) or not value.shape:
                common[key] = value
            elif value.numel >= first.masters[number].numel:
                partitioned.append(key)
            elif value.numel == 1:
                common[key] = value
            elif first.uses_muon(number) and not group.pieces:
                partitioned.append(key)  # shorter than the partition: whole parameters have no padding between them
            else:
                odd.append(str(key))
        for name in group.names:
            weights.states[name] = own(common)
        for key in partitioned:
            try:
                for name, tensor in _state(weights, number, key, group, optims):
                    weights.states[name][str(key)] = tensor
            except (CorruptError, UnsupportedError) as error:
                if not first.uses_muon(number):
                    raise
                # Errors in Muon's saved states do not affect the weights.
                weights.states_error = error
        if odd:
            weights.warnings.append(
                f"{first.file.path}: left out optimizer states of group {number} that do not belong to a single "
                f"parameter: {', '.join(odd)}."
            )
    weights.groups = list(_param_groups(groups, first))


def _state(
    weights: Weights, number: int, key: Any, group: Group, optims: Sequence[OptimFile]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the state `key` of each parameter of a group."""
    held = [optim.states[number].get(key) if number < len(optim.states) else None for optim in optims]
    if _is_whole(number, key, group, optims, held):
        yield from group.join(_whole_parameters(weights, number, key, cut, optims, held) for cut in group.cuts)
        return
    sizes = {rank: cut.sizes for cut in group.cuts for rank in cut.ranks}
    parts = [_partition(optim, number, key, held[rank], sizes[rank]) for rank, optim in enumerate(optims)]
    yield from group.apply(parts)


def _is_whole(number: int, key: Any, group: Group, optims: Sequence[OptimFile], held: Sequence[Any]) -> bool:
    """Return whether a state is of the whole parameters that overlap a rank's partition, rather than of the partition.

    The states of Muon are, but not all releases record it. Raises UnsupportedError if the state may be either,
    CorruptError if it can be neither.
    """
    first = optims[0]
    if group.pieces:
        return False
    if first.whole is not None:
        return key in first.whole[number]
    if not first.uses_muon(number):
        return False
    not_cut = not_whole = ""
    for cut in group.cuts:
        for index, rank in enumerate(cut.ranks):
            value, masters = held[rank], optims[rank].masters[number].numel
            size = value.numel if isinstance(value, LazyTensor) else 0
            whole = sum(math.prod(piece.shape) for piece in cut.whole(index))
            held_text = f"{optims[rank].file.path} has {size} elements of the state"
            if size not in (masters, *cut.sizes):
                not_cut = f"{held_text}, but {masters} elements of the weights"
            if size != whole:
                not_whole = f"{held_text}, but its parameters have {whole}"
    if not_cut and not_whole:
        raise CorruptError(
            f"Muon's state {key!r} of group {number} is neither partitioned like the weights ({not_cut}), nor "
            f"stored for whole parameters ({not_whole}). Elastic checkpoints lack the end of Muon's states.",
            "Convert only the weights, without the optimizer states.",
        )
    if not_cut or not_whole:
        return bool(not_cut)
    # If both lengths fit, no parameter is on two ranks, and both readings agree unless padding separates parameters.
    if number < len(first.alignments) and any(first.alignments[number]):
        raise UnsupportedError(
            f"{first.file.path}: Muon's state {key!r} of group {number} may belong to whole parameters or to the "
            "rank's partition: both have the same length, and the checkpoint does not record which it is.",
            "Convert only the weights, without the optimizer states.",
        )
    return False


def _whole_parameters(
    weights: Weights, number: int, key: Any, cut: GroupCut, optims: Sequence[OptimFile], held: Sequence[Any]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the states of the parameters of one copy of a group, where ranks have states of whole parameters.

    Each rank that has a part of a parameter has the whole state of it: these must be equal.
    """
    states: dict[str, LazyTensor] = {}
    for index, rank in enumerate(cut.ranks):
        slices = cut.whole(index)
        needed = sum(math.prod(piece.shape) for piece in slices)
        if not slices:
            continue
        value = _partition(optims[rank], number, key, held[rank], (), needed)
        for name, tensor in zero_layout.cut_flat(slices, [value]):
            if name in states:
                weights.equal_states.append((f"{cut.names[name]}.{key}", states[name], tensor))
            else:
                states[name] = tensor
    for piece in cut.slices:
        if piece.name in states:
            yield cut.names[piece.name], states[piece.name]


def _partition(
    optim: OptimFile, group: int, key: Any, value: Any, padded: Sequence[int], needed: int | None = None
) -> LazyTensor:
    """Return one rank's part of a state.

    It must have as many elements as the rank's master weights, or one of the sizes `padded` that these had before their
    padding was stripped; or, if given, `needed` elements. Raises CorruptError otherwise.
    """
    expected = optim.masters[group].numel if needed is None else needed
    if value is None and not expected:
        return Inline(b"", optim.masters[group].dtype, (0,))
    if (
        not isinstance(value, LazyTensor)
        or len(value.shape) != 1
        or (value.numel != expected and not (value.numel > expected and value.numel in padded))
    ):
        raise misfit(optim.file, f"the optimizer state {key!r} of group {group}", value, expected)
    return untagged(value)


def _param_groups(groups: Sequence[Group], first: OptimFile) -> Iterable[dict[str, Any]]:
    """Yield the optimizer's param_groups, which list their partitions by number, with names of parameters instead."""
    names = [group.names for group in groups]
    if not first.hyper:
        yield from ({"params": group} for group in names)
        return
    for hyper in first.hyper:
        numbers = hyper.get("params")
        members = (
            [index for index in numbers if type(index) is int and 0 <= index < len(names)]
            if isinstance(numbers, list)
            else []
        )
        yield {**hyper, "params": [name for index in members for name in names[index]]}
