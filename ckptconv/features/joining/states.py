"""The parameter of each state in ranks' files, and the part of it that the state covers. Pure.

A state that is a plain tensor covers the part that the rank has of the parameter: in the part's shape, or, under FSDP1,
as a piece of the flattened parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.joining.chunks import Shape
from ckptconv.features.joining.join import Ranks
from ckptconv.features.joining.names import Path, named
from ckptconv.features.joining.pieces import Piece, RankPart, Shards, Whole, parts_of, shape_of
from ckptconv.features.optimizer_states.numbering import Model, Named, Numbers, Order, naming, ways
from ckptconv.features.optimizer_states.states import listed, may_be_trained
from ckptconv.tensors.lazy import Concat, View, untagged
from ckptconv.text import count_of

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
_ADVICE = (
    "Save the states by parameter name, with FSDP.optim_state_dict, or get_optimizer_state_dict of "
    "torch.distributed.checkpoint."
)


def by_name(ranks: Ranks, root: Path, model: Ranks, parameters: Mapping[str, Path], orders: Sequence[Order]) -> Named:
    """Return the names of numbered parameters, and their source; no names if the states have names already. `orders`
    are the known orders of the model's parameters.

    `root` is the path of the optimizer in `ranks`; `parameters` are the paths, in `model`, of the model's tensors.
    Plain states that cover a part of their parameter become such parts in `ranks`. Raise UnsupportedError if the
    parameter of a state, or the part of it, is unknown.
    """
    depth = len(root) + 1
    states = [path for path in ranks.pieces if len(path) > depth and path[:depth] == (*root, _STATE)]
    keys = list(dict.fromkeys(str(path[depth]) for path in states))
    numbered = bool(keys) and all(key.isdecimal() for key in keys)
    numbering = _names(ranks, root, model, parameters, orders) if numbered else Named()
    names = numbering.names
    is_of_save = ranks.files.keys() == model.files.keys()
    for path in states:
        key = str(path[depth])
        name = names.get(key, key)
        if numbered and key not in names:
            raise _unknown(
                ranks.where,
                f"a state belongs to parameter {key}, but the optimizer lists only {count_of(len(names), 'parameter')}",
            )
        if name in parameters:
            _describe(ranks, path, name, model.pieces[parameters[name]], is_of_save)
        elif model.ready.get(parameters.get(name, ())) is None and _differ(ranks.pieces[path]):
            raise _unknown(ranks.where, f"the ranks have states of {named(name)} with different shapes")
    return numbering


def _names(ranks: Ranks, root: Path, model: Ranks, parameters: Mapping[str, Path], orders: Sequence[Order]) -> Named:
    numbers_names = naming(f"{ranks.where}: the optimizer")
    groups = _groups(ranks, root)
    kinds = _kinds(ranks, root, numbers_names.is_factor)
    spread = {number: kind for number, kind in kinds.items() if not kind.is_whole}
    pieces = {name: model.pieces[path] for name, path in parameters.items() if path in model.pieces}
    # A tensor that is whole on each rank may be a buffer, or a parameter that is not distributed. A plain state may
    # belong to such a parameter, or be a part of the state of a distributed one.
    ways = [
        (spread, _distinct({name: by_rank for name, by_rank in pieces.items() if not _kind(by_rank).is_whole})),
        (kinds, _distinct({name: by_rank for name, by_rank in pieces.items() if _is_floating(by_rank)})),
    ]
    recorded = numbers_names.recorded_names({_GROUPS: groups, _STATE: kinds})
    if recorded is not None:
        if len({*recorded.values()}) < len(recorded):
            raise _unknown(ranks.where, "its groups record the same name for two parameters")
        return Named(recorded, "")
    saved = None if orders else Order("the order of the ranks' state dicts", list(parameters))
    numbers = [[str(number) for number in listed(group.get("params"))] for group in groups]
    attempts = [
        numbers_names.attempted(Numbers(numbers, shapes), Model(dict(known), orders=orders, saved=saved), [])
        for shapes, known in ways
        if shapes.keys() <= {number for group in numbers for number in group}
    ]
    fitting: list[Named] = [attempt for attempt in attempts if attempt is not None]
    agreed = fitting[0] if fitting and all(attempt.names == fitting[0].names for attempt in fitting) else None
    if agreed is None:
        raise _unknown(
            ranks.where,
            f"its optimizer has {sum(len(listed(group.get('params'))) for group in groups)} numbered parameters in "
            f"{count_of(len(groups), 'group')}. Their shapes do not match the model in exactly one order, or these "
            "are flat parameters",
        )
    return agreed


def _unknown(where: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{where}: {reason}, so the states cannot be matched to parameters.", f"{_ADVICE} {ways()}")


def _groups(ranks: Ranks, root: Path) -> list[Mapping[str, Any]]:
    """Return the groups of parameters, without settings that are tensors."""
    whole = ranks.values.get((*root, _GROUPS))
    if isinstance(whole, list):
        return [group for group in whole if isinstance(group, dict)]
    by_index: dict[str | int, dict[str, Any]] = {}
    for path, value in ranks.values.items():
        if path[: len(root) + 1] == (*root, _GROUPS) and len(path) == len(root) + 3:
            by_index.setdefault(path[-2], {})[str(path[-1])] = value
    return list(by_index.values())


class _Kind(NamedTuple):
    """Whether each rank has all of a tensor, and the tensor's shape."""

    is_whole: bool
    shape: Shape


def _kind(by_rank: Mapping[int, Piece]) -> _Kind:
    sample = by_rank[min(by_rank)]
    return _Kind(isinstance(sample, Whole), shape_of(sample))


def _kinds(ranks: Ranks, root: Path, is_factor: Callable[[Any], bool]) -> dict[str, _Kind]:
    """Return the kind of each numbered parameter, by its states, if all states and all ranks have the same kind.
    Parameters with factored states have none: factors, whose keys `is_factor` knows, have shapes of their own."""
    kinds: dict[str, set[_Kind]] = {}
    factored: set[str] = set()
    for path, by_rank in ranks.pieces.items():
        is_state = path[: len(root) + 1] == (*root, _STATE) and len(path) > len(root) + 2 and path[-1] != _STEP
        if is_state and is_factor(path[-1]):
            factored.add(str(path[len(root) + 1]))
        elif is_state and not _differ(by_rank):
            kinds.setdefault(str(path[len(root) + 1]), set()).add(_kind(by_rank))
    # Some states are numbers, whatever the shape of their parameter.
    formed = {number: {kind for kind in of_one if kind.shape} or of_one for number, of_one in kinds.items()}
    return {number: of_one.pop() for number, of_one in formed.items() if len(of_one) == 1 and number not in factored}


def _is_floating(by_rank: Mapping[int, Piece]) -> bool:
    return any(may_be_trained(tensor.dtype) for piece in by_rank.values() for tensor in parts_of(piece))


def _distinct(known: Mapping[str, Mapping[int, Piece]]) -> list[tuple[str, _Kind]]:
    """Return the names and kinds of tensors in order, each tied tensor once."""
    first_of: dict[Any, tuple[str, _Kind]] = {}
    for name, by_rank in known.items():
        tensor = next(iter(parts_of(by_rank[min(by_rank)])), None)
        facts = getattr(tensor, "facts", None)
        key = name if facts is None or not facts.storage else (facts.storage, facts.storage_offset)
        first_of.setdefault(key, (name, _kind(by_rank)))
    return list(first_of.values())


def _differ(by_rank: Mapping[int, Piece]) -> bool:
    shapes = {piece.tensor.shape for piece in by_rank.values() if isinstance(piece, Whole)}
    return len(shapes) > 1


def _describe(ranks: Ranks, path: Path, name: str, parameter: Mapping[int, Piece], is_of_save: bool) -> None:
    """Replace each rank's state, if it is a plain tensor, by the part of its parameter that it covers. `is_of_save` is
    whether the ranks of the states are those of the model."""
    by_rank = ranks.pieces[path]
    if not all(isinstance(piece, Whole) for piece in by_rank.values()):
        return
    wholes = {rank: piece.tensor for rank, piece in by_rank.items() if isinstance(piece, Whole)}
    sample = parameter[min(parameter)]
    shape = shape_of(sample)
    if all(not tensor.shape or tensor.shape == shape for tensor in wholes.values()):
        return
    parts = {rank: parameter.get(rank) for rank in wholes}
    if all(isinstance(part, RankPart) and part.tensor.shape == wholes[rank].shape for rank, part in parts.items()):
        for rank, part in parts.items():
            if isinstance(part, RankPart):
                by_rank[rank] = part._replace(tensor=wholes[rank])
        return
    total = sum(tensor.numel for tensor in wholes.values())
    if (
        is_of_save
        and all(len(tensor.shape) == 1 for tensor in wholes.values())
        and total == math.prod(shape)
        and (len(wholes) == 1 or not isinstance(sample, Shards | Whole))
    ):
        filled = [untagged(tensor) for _, tensor in sorted(wholes.items()) if tensor.numel]
        if filled:
            ranks.ready[path] = View(Concat(tuple(filled)), filled[0].dtype, shape)
            del ranks.pieces[path]
            return
    sizes = sorted({tensor.shape for tensor in wholes.values()})
    raise _unknown(
        ranks.where,
        f"the state of {named(name)} has the shape {' or '.join(str(list(size)) for size in sizes[:2])}, but the "
        f"parameter has {list(shape)}",
    )
