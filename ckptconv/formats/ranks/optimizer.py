"""Which parameter each state of an optimizer is of, and which part of it. Pure.

torch numbers an optimizer's parameters in the order in which they were given to it, which is that of the model's
parameters; names are in `param_names`, since torch 2.6, or FSDP puts them in place of the numbers. A number is believed
if all states have the shapes of the parameters so numbered. States that are plain tensors have the parts that the
parameter has on the same rank: in its local shape, or, under FSDP1, as a piece of the flattened parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptconv.errors import UnsupportedError
from ckptconv.formats.dcp.chunks import Shape
from ckptconv.formats.dcp.metadata import Path, named
from ckptconv.formats.dcp.paths import listed
from ckptconv.formats.ranks.join import Ranks
from ckptconv.formats.ranks.pieces import Part, Piece, Shards, Whole, shape_of
from ckptconv.tensors.lazy import Concat, View, untagged

_STATE, _GROUPS = "state", "param_groups"
# Comparisons of numbered parameters with the model's, at most.
_MOST = 1 << 24
_ADVICE = (
    "Save them with FSDP.optim_state_dict, or get_optimizer_state_dict of torch.distributed.checkpoint: they "
    "name the parameters."
)


def by_name(ranks: Ranks, root: Path, model: Ranks, parameters: Mapping[str, Path]) -> dict[str, str]:
    """Return the names of numbered parameters: {number: name}; {} if the states have names already.

    `root` is where the optimizer is in `ranks`; `parameters` are the paths, in `model`, of the model's tensors. States
    that are parts of their parameter are described as such. Raise UnsupportedError if nothing tells which
    parameter a state is of, or which part.
    """
    depth = len(root) + 1
    states = [path for path in ranks.pieces if len(path) > depth and path[:depth] == (*root, _STATE)]
    keys = list(dict.fromkeys(str(path[depth]) for path in states))
    numbered = bool(keys) and all(key.isdecimal() for key in keys)
    names = _names(ranks, root, model, parameters) if numbered else {}
    for path in states:
        key = str(path[depth])
        name = names.get(key, key)
        if numbered and key not in names:
            raise _unknown(ranks.where, f"a state is of parameter {key}, and the model has {len(names)}")
        if name in parameters:
            _describe(ranks, path, name, model.pieces[parameters[name]])
        elif model.ready.get(parameters.get(name, ())) is None and _differ(ranks.pieces[path]):
            raise _unknown(ranks.where, f"the ranks have states of {named(name)} of different shapes")
    return names


def _names(ranks: Ranks, root: Path, model: Ranks, parameters: Mapping[str, Path]) -> dict[str, str]:
    groups = _groups(ranks, root)
    numbers = [[str(number) for number in listed(group.get("params"))] for group in groups]
    stated = [listed(group.get("param_names")) for group in groups]
    if all(stated) and [len(own) for own in stated] == [len(own) for own in numbers]:
        pairs = zip(numbers, stated, strict=True)
        return {number: str(name) for own, told in pairs for number, name in zip(own, told, strict=True)}
    own = [number for group in numbers for number in group]
    if len(groups) > 1:
        raise _unknown(ranks.where, f"its optimizer has its parameters by number, in {len(groups)} groups")
    shapes = _stated_shapes(ranks, root)
    found = matched([shapes.get(number) for number in own], _distinct(model, parameters))
    if found is None:
        raise _unknown(
            ranks.where,
            f"its optimizer has {len(own)} parameters by number, whose shapes are not those of the model's in this "
            "order, or are flat parameters, each of them several in one",
        )
    return dict(zip(own, found, strict=True))


def matched(wanted: Sequence[Shape | None], known: Sequence[tuple[str, Shape]]) -> list[str] | None:
    """Return the names of the parameters of the shapes `wanted` among the `known`, in their order, with the frozen ones
    left out; None if there is no such choice, or more than one. A shape that is None may be any.

    >>> matched([(2, 8)], [("base", (8, 8)), ("lora_A", (2, 8)), ("lora_B", (8, 2))])
    ['lora_A']
    """
    if len(wanted) == len(known):
        fits = all(one in (None, shape) for one, (_, shape) in zip(wanted, known, strict=True))
        return [name for name, _ in known] if fits else None
    if len(wanted) * len(known) > _MOST:
        return None
    # ways[i]: in how many ways the first i shapes are found among the names so far, at most 2. `last` has the choices.
    ways = [1] + [0] * len(wanted)
    last: list[list[str]] = [[] for _ in range(len(wanted) + 1)]
    for name, shape in known:
        for at in range(len(wanted), 0, -1):
            if ways[at - 1] and wanted[at - 1] in (None, shape):
                if not ways[at]:
                    last[at] = [*last[at - 1], name]
                ways[at] = min(ways[at] + ways[at - 1], 2)
    return last[-1] if ways[-1] == 1 else None


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


def _stated_shapes(ranks: Ranks, root: Path) -> dict[str, Shape]:
    """Return the shapes of the distributed states of each parameter."""
    found: dict[str, Shape] = {}
    for path, held in ranks.pieces.items():
        piece = held[min(held)]
        if path[: len(root) + 1] == (*root, _STATE) and len(path) > len(root) + 1 and not isinstance(piece, Whole):
            found.setdefault(str(path[len(root) + 1]), shape_of(piece))
    return found


def _distinct(model: Ranks, parameters: Mapping[str, Path]) -> list[tuple[str, Shape]]:
    """Return the names and shapes of the model's parameters in order, a tied one once: of its distributed tensors, if
    it has any, for buffers are whole on each rank."""
    held = {name: model.pieces[path] for name, path in parameters.items() if path in model.pieces}
    spread = {name: own for name, own in held.items() if not isinstance(own[min(own)], Whole)}
    found: dict[Any, tuple[str, Shape]] = {}
    for name, own in (spread or held).items():
        one = own[min(own)]
        tensor = one.tensor if isinstance(one, (Whole, Part)) else next((tile.tensor for tile in one.tiles), None)
        facts = getattr(tensor, "facts", None)
        key = name if facts is None or not facts.storage else (facts.storage, facts.storage_offset)
        found.setdefault(key, (name, shape_of(one)))
    return list(found.values())


def _differ(held: Mapping[int, Piece]) -> bool:
    shapes = {piece.tensor.shape for piece in held.values() if isinstance(piece, Whole)}
    return len(shapes) > 1


def _describe(ranks: Ranks, path: Path, name: str, parameter: Mapping[int, Piece]) -> None:
    """Say which part of its parameter each rank's state is, if it is a plain tensor."""
    held = ranks.pieces[path]
    if not all(isinstance(piece, Whole) for piece in held.values()):
        return
    wholes = {rank: piece.tensor for rank, piece in held.items() if isinstance(piece, Whole)}
    one = parameter[min(parameter)]
    shape = shape_of(one)
    if all(not tensor.shape or tensor.shape == shape for tensor in wholes.values()):
        return
    parts = {rank: parameter.get(rank) for rank in wholes}
    if all(isinstance(part, Part) and part.tensor.shape == wholes[rank].shape for rank, part in parts.items()):
        for rank, part in parts.items():
            if isinstance(part, Part):
                held[rank] = part._replace(tensor=wholes[rank])
        return
    total = sum(tensor.numel for tensor in wholes.values())
    if (
        all(len(tensor.shape) == 1 for tensor in wholes.values())
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
