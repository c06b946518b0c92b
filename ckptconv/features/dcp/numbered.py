"""The model whose parameters an optimizer numbers, and whether their states are whole. Pure.

Source: torch/optim/optimizer.py, torch/distributed/fsdp/_flat_param.py and torch/distributed/checkpoint/planner.py of
torch 2.1 to 2.13. `optimizer.state_dict()` numbers the parameters. Its states are whole with DDP, with FSDP2 and in a
single process. Under FSDP1 a state is a plain tensor of one dimension: the rank's part of the flattened parameter.
Every rank saves its own under the same name, DCP keeps that of one rank, and the checkpoint does not record that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ckptconv.errors import CkptconvError, UnsupportedError
from ckptconv.features.dcp.described import Described
from ckptconv.features.dcp.metadata import Description, EntryPlace, SavedTensor, Shape
from ckptconv.features.joining.names import Path, dotted, named, split_name, subtree
from ckptconv.features.optimizer_states.numbering import Model, Order
from ckptconv.features.optimizer_states.states import by_parameter, is_numbered, is_statistic, may_be_trained
from ckptconv.features.optimizer_states.states import named as named_states
from ckptconv.text import some

# A state of a numbered parameter, below its optimizer.
_STATE = re.compile(r"state\.(\d+)\.([^.]+)")
_STEP = "step"
# The prefix of the names of the first rank's files.
_FIRST = "__0_"
# The states of a parameter, by name.
_States: TypeAlias = dict[str, SavedTensor]


def model_of(weights: Mapping[str, SavedTensor], orders: Sequence[Order]) -> Model:
    """Return the model of `weights`, whose order the user gives by `orders`. The first rank describes what it saves in
    the order of its state dict: if it has a part of each tensor, that is the order of all."""
    shapes = {
        name: tensor.shape
        for name, tensor in weights.items()
        if may_be_trained(tensor.dtype) and not is_statistic(name, weights)
    }
    is_of_first = all(map(_is_of_first, weights.values()))
    saved = Order("the order of the checkpoint", list(weights)) if is_of_first and not orders else None
    return Model(shapes, orders=orders, why="the checkpoint does not record the order of its modules", saved=saved)


def _is_of_first(tensor: SavedTensor) -> bool:
    """Return whether the first rank saved a part of a tensor."""
    return any(isinstance(chunk.place, EntryPlace) and chunk.place.name.startswith(_FIRST) for chunk in tensor.chunks)


def pieces_error(
    described: Description, roots: Collection[Path], weights: Collection[SavedTensor], directory: str
) -> UnsupportedError | None:
    """Return an error if states of numbered parameters, in the optimizers at `roots`, are pieces; else None.

    A parameter's states are taken for pieces if all of them have one dimension, and lengths that the model's `weights`
    do not explain. Without weights, those of all parameters must have one dimension, and be in several files.
    """
    numbered = list(_numbered(described, roots))
    flat = [states for states in numbered if all(map(_is_vector, states.values()))]
    if weights:
        shapes = {tensor.shape for tensor in weights if _is_in_one_chunk(tensor)}
        # LBFGS has states of all parameters in one vector.
        shapes.add((sum(math.prod(tensor.shape) for tensor in weights if tensor.dtype.kind == "f"),))
        sides = {side for shape in shapes for side in shape}
        flat = [states for states in flat if not _are_explained(states, shapes, sides)]
    elif len(flat) < len(numbered) or len(_files(flat)) < 2:
        flat = []
    if not flat:
        return None
    names = [name for states in flat for name in states]
    return UnsupportedError(
        f"{directory}: its optimizer numbers the parameters, and the shapes of {some(names, most=2, form=named)} "
        "match no parameter. These states are the pieces of one FSDP rank, and the checkpoint does not contain the "
        "other ranks' pieces.",
        "Save the states with FSDP.optim_state_dict, or get_optimizer_state_dict of torch.distributed.checkpoint. The "
        "weights can be converted without the states.",
    )


def _numbered(described: Description, roots: Collection[Path]) -> Iterator[_States]:
    """Yield the states of each numbered parameter, but its step and other numbers."""
    states: dict[tuple[Path, str], _States] = {}
    for name, tensor in described.tensors.items():
        path = split_name(described.paths[name])
        for depth in range(len(path)):
            match = _STATE.fullmatch(dotted(path[depth:])) if path[:depth] in roots else None
            if match and match[2] != _STEP and tensor.shape:
                states.setdefault((path[:depth], match[1]), {})[name] = tensor
    yield from states.values()


def _is_vector(tensor: SavedTensor) -> bool:
    return len(tensor.shape) == 1 and _is_in_one_chunk(tensor)


def _is_in_one_chunk(tensor: SavedTensor) -> bool:
    """Return whether one rank saved all of a tensor, as ranks do for a tensor that is not distributed."""
    return [chunk.sizes for chunk in tensor.chunks] == [tensor.shape]


def _are_explained(states: _States, shapes: Collection[Shape], sides: Collection[int]) -> bool:
    """Return whether states of parameters with these `shapes` and lengths of `sides` can be vectors of these lengths.

    States of a vector have its length. Optimizers that factor their states, such as Adafactor, have some of the lengths
    of rows and columns.
    """
    lengths = {tensor.shape[0] for tensor in states.values()}
    if len(lengths) == 1:
        return (lengths.pop(),) in shapes
    return any(length in sides for length in lengths)


def _files(parameters: Collection[_States]) -> set[str]:
    return {
        chunk.place.name
        for states in parameters
        for tensor in states.values()
        for chunk in tensor.chunks
        if isinstance(chunk.place, EntryPlace)
    }


def read_states(
    checkpoint: Described, parameters: Mapping[str, SavedTensor], orders: Sequence[Order], is_model: bool
) -> tuple[dict[str, Any] | None, CkptconvError | None, list[str], Mapping[str, Hashable]]:
    """Return the states by parameter, and the groups, of the optimizers in `checkpoint`, None if there are none; why
    they cannot be converted; notes on the source of names of numbers; and the identity of its files.

    `parameters` are the model's weights, and `orders` those that the user gives. `is_model`: the checkpoint has these
    weights too.
    """
    described, roles = checkpoint.described, checkpoint.roles
    names: dict[Path, list[str]] = {}
    for name, way in described.paths.items():
        optimizer = roles.optimizer_of(way)
        if optimizer is not None:
            names.setdefault(optimizer, []).append(name)
    if not names and not is_model:
        names[()] = list(described.paths)
    error = pieces_error(described, names, parameters.values(), checkpoint.directory)
    if error:
        return None, error, [], {}
    trees = []
    for at, of_optimizer in names.items():
        tree = checkpoint.tree(of_optimizer, key=dotted(at))
        beside = dotted(roles.model_beside(at))
        trees.append((f"{beside}." if beside else "", subtree(tree, at)))
    numbered = [tree for _, tree in trees if is_numbered(tree, parameters)]
    if not numbered or len(numbered) < len(trees):
        return by_parameter(trees, parameters, checkpoint.directory), None, [], {}
    try:
        optimizers = [(dotted(at), tree) for at, tree in zip(names, numbered, strict=True)]
        states, by = named_states(optimizers, model_of(parameters, orders), checkpoint.directory)
    except UnsupportedError as unnamed:
        if len(trees) > 1 or orders:
            return None, unnamed, [], {}
        kept = (
            f"The optimizer states keep parameter numbers, because the parameter names are not known: {unnamed.message}"
        )
        return by_parameter([("", numbered[0])], parameters, checkpoint.directory), None, [kept], {}
    return states, None, by.notes, by.inputs
