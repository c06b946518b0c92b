"""Which parameter each state in ranks' files is of, and which part of it. Pure.

States that are plain tensors have the parts that the parameter has on the same rank: in its local shape, or, under
FSDP1, as a piece of the flattened parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.formats.chunks import Shape
from ckptconv.formats.joining.join import Ranks
from ckptconv.formats.joining.names import Path, named
from ckptconv.formats.joining.pieces import Piece, RankPart, Shards, Whole, parts_of, shape_of
from ckptconv.formats.numbers.matching import WAYS, Model, Named, Numbers, Order, attempted
from ckptconv.formats.numbers.orders import follows_modules, may_be_trained
from ckptconv.formats.numbers.states import is_factor, listed, recorded_names
from ckptconv.tensors.lazy import Concat, View, untagged

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
_ADVICE = (
    "Save them with FSDP.optim_state_dict, or get_optimizer_state_dict of torch.distributed.checkpoint: they "
    f"name the parameters. {WAYS}"
)


def by_name(ranks: Ranks, root: Path, model: Ranks, parameters: Mapping[str, Path], orders: Sequence[Order]) -> Named:
    """Return the names of numbered parameters, and what told them; none if the states have names already. `orders` are
    those that are known of the model's parameters.

    `root` is where the optimizer is in `ranks`; `parameters` are the paths, in `model`, of the model's tensors. States
    that are parts of their parameter are described as such. Raise UnsupportedError if nothing tells which
    parameter a state is of, or which part.
    """
    depth = len(root) + 1
    states = [path for path in ranks.pieces if len(path) > depth and path[:depth] == (*root, _STATE)]
    keys = list(dict.fromkeys(str(path[depth]) for path in states))
    numbered = bool(keys) and all(key.isdecimal() for key in keys)
    told = _names(ranks, root, model, parameters, orders) if numbered else Named()
    names = told.names
    is_of_save = ranks.files.keys() == model.files.keys()
    for path in states:
        key = str(path[depth])
        name = names.get(key, key)
        if numbered and key not in names:
            raise _unknown(ranks.where, f"a state is of parameter {key}, and the model has {len(names)}")
        if name in parameters:
            _describe(ranks, path, name, model.pieces[parameters[name]], is_of_save)
        elif model.ready.get(parameters.get(name, ())) is None and _differ(ranks.pieces[path]):
            raise _unknown(ranks.where, f"the ranks have states of {named(name)} of different shapes")
    return told


def _names(ranks: Ranks, root: Path, model: Ranks, parameters: Mapping[str, Path], orders: Sequence[Order]) -> Named:
    groups = _groups(ranks, root)
    kinds = _kinds(ranks, root)
    spread = {number: kind for number, kind in kinds.items() if not kind.is_whole}
    held = {name: model.pieces[path] for name, path in parameters.items() if path in model.pieces}
    # What is whole on each rank may be a buffer, or a parameter that is not distributed. A plain state may be of such a
    # parameter, or a part of one that is.
    ways = [
        (spread, _distinct({name: own for name, own in held.items() if not isinstance(own[min(own)], Whole)})),
        (kinds, _distinct({name: own for name, own in held.items() if _is_floating(own)})),
    ]
    recorded = recorded_names({_GROUPS: groups, _STATE: kinds})
    if recorded is not None:
        if len({*recorded.values()}) < len(recorded):
            raise _unknown(ranks.where, "its groups record one name for two parameters")
        return Named(recorded, "")
    if not orders and follows_modules(parameters):
        orders = [Order("the order of the ranks' state dicts", list(parameters))]
    numbers = [[str(number) for number in listed(group.get("params"))] for group in groups]
    told = [
        attempted(Numbers(numbers, shapes), Model(dict(known), orders=orders), [])
        for shapes, known in ways
        if shapes.keys() <= {number for group in numbers for number in group}
    ]
    fitting = [each for each in told if each is not None]
    found = fitting[0] if fitting and all(each.names == fitting[0].names for each in fitting) else None
    if found is None:
        raise _unknown(
            ranks.where,
            f"its optimizer has {sum(len(listed(group.get('params'))) for group in groups)} parameters by number, in "
            f"{len(groups)} groups, whose shapes do not fit those of the model in exactly one order, or are flat "
            "parameters, each of them several in one",
        )
    return found


def _unknown(where: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{where}: {reason}, and nothing tells which states are of which parameter.", _ADVICE)


def _groups(ranks: Ranks, root: Path) -> list[Mapping[str, Any]]:
    """Return the groups of parameters, without settings that are tensors."""
    whole = ranks.values.get((*root, _GROUPS))
    if isinstance(whole, list):
        return [group for group in whole if isinstance(group, dict)]
    found: dict[str | int, dict[str, Any]] = {}
    for path, value in ranks.values.items():
        if path[: len(root) + 1] == (*root, _GROUPS) and len(path) == len(root) + 3:
            found.setdefault(path[-2], {})[str(path[-1])] = value
    return list(found.values())


class _Kind(NamedTuple):
    """Whether each rank has all of a tensor, and the tensor's shape."""

    is_whole: bool
    shape: Shape


def _kind(held: Mapping[int, Piece]) -> _Kind:
    one = held[min(held)]
    return _Kind(isinstance(one, Whole), shape_of(one))


def _kinds(ranks: Ranks, root: Path) -> dict[str, _Kind]:
    """Return the kind of each numbered parameter, by its states, if they are of one kind, and are not others on other
    ranks; none of one with factored states, which have shapes of their own."""
    kinds: dict[str, set[_Kind]] = {}
    factored: set[str] = set()
    for path, held in ranks.pieces.items():
        is_state = path[: len(root) + 1] == (*root, _STATE) and len(path) > len(root) + 2 and path[-1] != _STEP
        if is_state and is_factor(path[-1]):
            factored.add(str(path[len(root) + 1]))
        elif is_state and not _differ(held):
            kinds.setdefault(str(path[len(root) + 1]), set()).add(_kind(held))
    # Some states are numbers, whatever the shape of their parameter.
    formed = {number: {kind for kind in own if kind.shape} or own for number, own in kinds.items()}
    return {number: own.pop() for number, own in formed.items() if len(own) == 1 and number not in factored}


def _is_floating(held: Mapping[int, Piece]) -> bool:
    return any(may_be_trained(tensor.dtype) for piece in held.values() for tensor in parts_of(piece))


def _distinct(known: Mapping[str, Mapping[int, Piece]]) -> list[tuple[str, _Kind]]:
    """Return the names and kinds of tensors in order, a tied one once."""
    found: dict[Any, tuple[str, _Kind]] = {}
    for name, own in known.items():
        one = own[min(own)]
        tensor = one.tensor if isinstance(one, (Whole, RankPart)) else next((tile.tensor for tile in one.tiles), None)
        facts = getattr(tensor, "facts", None)
        key = name if facts is None or not facts.storage else (facts.storage, facts.storage_offset)
        found.setdefault(key, (name, _kind(own)))
    return list(found.values())


def _differ(held: Mapping[int, Piece]) -> bool:
    shapes = {piece.tensor.shape for piece in held.values() if isinstance(piece, Whole)}
    return len(shapes) > 1


def _describe(ranks: Ranks, path: Path, name: str, parameter: Mapping[int, Piece], is_of_save: bool) -> None:
    """Say which part of its parameter each rank's state is, if it is a plain tensor. `is_of_save` is whether the states
    are of the same ranks as the model."""
    held = ranks.pieces[path]
    if not all(isinstance(piece, Whole) for piece in held.values()):
        return
    wholes = {rank: piece.tensor for rank, piece in held.items() if isinstance(piece, Whole)}
    one = parameter[min(parameter)]
    shape = shape_of(one)
    if all(not tensor.shape or tensor.shape == shape for tensor in wholes.values()):
        return
    parts = {rank: parameter.get(rank) for rank in wholes}
    if all(isinstance(part, RankPart) and part.tensor.shape == wholes[rank].shape for rank, part in parts.items()):
        for rank, part in parts.items():
            if isinstance(part, RankPart):
                held[rank] = part._replace(tensor=wholes[rank])
        return
    total = sum(tensor.numel for tensor in wholes.values())
    if (
        is_of_save
        and all(len(tensor.shape) == 1 for tensor in wholes.values())
        and total == math.prod(shape)
        and (len(wholes) == 1 or not isinstance(one, Shards | Whole))
    ):
        filled = [untagged(tensor) for _, tensor in sorted(wholes.items()) if tensor.numel]
        if filled:
            ranks.ready[path] = View(Concat(tuple(filled)), filled[0].dtype, shape)
            del ranks.pieces[path]
            return
    sizes = sorted({tensor.shape for tensor in wholes.values()})
    raise _unknown(
        ranks.where,
        f"the state of {named(name)} has {' or '.join(str(list(size)) for size in sizes[:2])}, and the parameter "
        f"{list(shape)}",
    )
