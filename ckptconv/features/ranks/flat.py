"""FSDP1's flat parameters (LOCAL_STATE_DICT), divided into the parameters in them. Pure.

Source: torch/distributed/fsdp/{_flat_param,_state_dict_utils}.py of torch 2.1 to 2.13. FSDP flattens the parameters of
a module into one, with padding between them, and cuts that for the ranks. Each rank saves its part of `_flat_param` as
a ShardedTensor. With use_orig_params, it also saves each parameter as a view of that part: one-dimensional, without its
shape. So the views show where each parameter is; without them, the optimizer's groups show the order. The optimizer's
states, if they were saved, show the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.features.joining.chunks import Shape
from ckptconv.features.joining.join import Ranks
from ckptconv.features.joining.names import FLAT_PARAMETER, MAX_DEPTH, Path, dotted, named
from ckptconv.features.joining.pieces import Shards, Whole
from ckptconv.tensors.lazy import Concat, LazyTensor, Narrow, Tagged, View, untagged

# FSDP aligns each parameter in a flat one to 16 bytes in the dtype of computing: to at most so many elements.
_ALIGNMENT = 8
# FSDP's name for the flat parameter of a module.
_NAME = "_flat_param"


def is_local(ranks: Ranks) -> bool:
    """Return whether the state dict has flat parameters."""
    return any(map(_is_flat, ranks.pieces))


def _is_flat(path: Path) -> bool:
    return FLAT_PARAMETER.search(dotted(path)) is not None


def _shapes_of(optimizer: Any) -> dict[str, list[Shape]]:
    """Return the shapes of the states of each parameter in an optimizer's state dict by name."""
    states = optimizer["state"] if optimizer else {}
    return {
        name: [value.shape for value in state.values() if isinstance(value, LazyTensor) and value.shape]
        for name, state in states.items()
    }


def split(ranks: Ranks, model: Path, optimizer: Any) -> None:
    """Replace the flat parameters of `ranks`, and their views, by the parameters in them. The state dict of the
    `optimizer` by name, if there is one, has their shapes. `model` is the path of the model in `ranks`.

    If a shape is unknown, leave the flat parameters, and drop the views. Raise CorruptError if the parts of a parameter
    are not contiguous.
    """
    shapes = {(*model, name): known for name, known in _shapes_of(optimizer).items()}
    flat = {path: by_rank for path, by_rank in ranks.pieces.items() if _is_flat(path)}
    starts: dict[Any, tuple[str, int]] = {}
    for path, by_rank in flat.items():
        for piece in by_rank.values():
            for tile in piece.tiles if isinstance(piece, Shards) else ():
                if isinstance(tile.tensor, Tagged) and len(tile.offsets) == 1 and tile.tensor.numel:
                    facts = tile.tensor.facts
                    starts[facts.storage] = dotted(path), tile.offsets[0] - facts.storage_offset
    views = {path: parts for path in ranks.pieces if path not in flat and (parts := _views(ranks, path, starts))}
    if not views:
        order = [(*model, name) for group in (optimizer or {}).get("param_groups", ()) for name in group["params"]]
        _divide(ranks, list(flat), order, shapes)
        return
    ready = _shaped(ranks, views, shapes)
    for path in views:
        del ranks.pieces[path]
    if ready is not None and all(_is_covered(path, ranks, list(views.values())) for path in flat):
        for path in flat:
            del ranks.pieces[path]
        ranks.ready.update(ready)


def _divide(ranks: Ranks, flat: list[Path], order: list[Path], shapes: Mapping[Path, list[Shape]]) -> None:
    """Replace `flat` parameters without views by the parameters in them, if these fill each flat one exactly.

    Without use_orig_params there are no views and no padding, and the optimizer's groups list the parameters in their
    `order` in the flat ones. A module's parameters are in its own flat parameter, or else in that of a module around
    it.
    """
    prefixes = {dotted(path).removesuffix(_NAME): path for path in flat}
    inside: dict[Path, list[Path]] = {path: [] for path in flat}
    for path in dict.fromkeys(order):
        steps = [f"{step}." for step in dotted(path).split(".", MAX_DEPTH)[:-1]]
        around = ("".join(steps[:depth]) for depth in range(len(steps), -1, -1))
        prefix = next((candidate for candidate in around if candidate in prefixes), None)
        if path not in ranks.pieces and prefix is not None:
            inside[prefixes[prefix]].append(path)
    parameters: dict[Path, LazyTensor] = {}
    joined = ranks.join(flat)
    for whole, paths_inside in inside.items():
        tensor = untagged(joined.tensors[whole])
        start = 0
        for path in paths_inside:
            known_shapes = set(shapes.get(path, ()))
            if len(known_shapes) != 1:
                return
            shape = known_shapes.pop()
            numel = math.prod(shape)
            if start + numel > tensor.numel:
                return
            parameters[path] = View(Narrow(tensor, 0, start, numel), tensor.dtype, shape)
            start += numel
        if start != tensor.numel:
            return
    for path in flat:
        del ranks.pieces[path]
    ranks.ready.update(parameters)
    ranks.equal.extend(joined.equal)


def _shaped(
    ranks: Ranks, views: Mapping[Path, Mapping[tuple[str, int], LazyTensor]], shapes: Mapping[Path, Iterable[Shape]]
) -> dict[Path, LazyTensor] | None:
    """Return the parameters whose parts are `views`; None if the shape of one is unknown."""
    # Tied parameters have one place, and the optimizer has one of their names.
    shapes_at: dict[Any, set[Shape]] = {}
    for path, by_place in views.items():
        shapes_at.setdefault(min(by_place), set()).update(shapes.get(path, ()))
    parameters: dict[Path, LazyTensor] = {}
    tensors: dict[Any, LazyTensor] = {}
    for path, by_place in views.items():
        parts = _consecutive(ranks, path, by_place)
        numel = sum(part.numel for part in parts)
        fitting = {shape for shape in shapes_at[min(by_place)] if math.prod(shape) == numel}
        if len(fitting) != 1:
            return None
        shape = fitting.pop()
        key = (min(by_place), numel)
        if key not in tensors:
            tensors[key] = View(Concat(tuple(parts)), parts[0].dtype, shape)
        parameters[path] = tensors[key]
    return parameters


def _views(ranks: Ranks, path: Path, starts: Mapping[Any, tuple[str, int]]) -> dict[tuple[str, int], LazyTensor]:
    """Return the parts of a parameter by their start in a flat parameter; {} if it is not in one."""
    views: dict[tuple[str, int], LazyTensor] = {}
    for _, piece in sorted(ranks.pieces[path].items()):
        if not isinstance(piece, Whole) or not piece.tensor.numel:
            continue
        facts = piece.tensor.facts
        if facts.storage not in starts:
            return {}
        where, base = starts[facts.storage]
        part = untagged(piece.tensor)
        kept = views.setdefault((where, base + facts.storage_offset), part)
        if kept is not part:
            ranks.equal.append((dotted(path), kept, part))
    return views


def _consecutive(ranks: Ranks, path: Path, views: Mapping[tuple[str, int], LazyTensor]) -> list[LazyTensor]:
    """Return the parts of a parameter in order. Raise CorruptError if they are not contiguous."""
    parts: list[LazyTensor] = []
    expected = min(views)
    for place, part in sorted(views.items()):
        if place != expected or len(part.shape) != 1:
            raise CorruptError(
                f"{ranks.where}: the parts of {named(dotted(path))} in a flat parameter are not contiguous: a rank's "
                "part is missing, or belongs to another save.",
                "Copy the files of all ranks to one place.",
            )
        parts.append(part)
        expected = place[0], place[1] + part.numel
    return parts


def _is_covered(path: Path, ranks: Ranks, views: Iterable[Mapping[tuple[str, int], LazyTensor]]) -> bool:
    """Return whether the views of a flat parameter cover all of it except padding."""
    places = sorted(
        {(at, at + part.numel) for parts in views for (where, at), part in parts.items() if where == dotted(path)}
    )
    piece = next(iter(ranks.pieces[path].values()))
    if not isinstance(piece, Shards) or not places:
        return False
    total, reached = math.prod(piece.shape), 0
    for start, stop in [*places, (total, total)]:
        if start - reached >= _ALIGNMENT + (len(ranks.files) if start == total else 0):
            return False
        reached = max(reached, stop)
    return True
