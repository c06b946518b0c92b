"""The names of an optimizer's numbered parameters. Pure.

A save has them in `param_names`, since torch 2.6. Otherwise `matching` decides which names the numbers have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptconv.features.optimizer_numbers import matching
from ckptconv.features.optimizer_numbers.order_files import completed
from ckptconv.features.optimizer_states.numbering import Model, Named, Numbers
from ckptconv.features.optimizer_states.states import is_by_number, listed, members, renamed
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import name_of

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
# bitsandbytes' codes of 8 bits, one for each element of a parameter.
_CODES = "state1"
# The suffixes of Adafactor's states of rows and columns.
_FACTORS = ("_row", "_col")


def named(
    optimizers: Sequence[tuple[str, Mapping[str, Any]]],
    trees: Sequence[Mapping[str, Any]],
    model: Model,
    where: str,
) -> tuple[list[dict[str, Any]], Named]:
    """Return the states of `optimizers` of a model by name, and the numbers' names and source. `trees` are the states
    and groups of each optimizer, in the form of `states.by_parameter`.

    Raise UnsupportedError, which begins with `where`, if the parameter of a number is unknown.
    """
    model = completed(model)
    renamed_trees: list[dict[str, Any]] = []
    numbered: list[tuple[str, dict[str, Any]]] = []
    for at, ((label, optimizer), tree) in enumerate(zip(optimizers, trees, strict=True)):
        if not is_by_number(optimizer):
            renamed_trees.append({**tree})
            continue
        recorded = recorded_names(optimizer)
        names = recorded and matching.confirmed(recorded, tree[_STATE], numbers_of(tree), model)
        if recorded and not names:
            # Names of another model would be numbered in its order.
            model = model._replace(orders=[order for order in model.orders if order.is_asked])
            if not model.orders:
                why = "the names in its groups do not match the model's names and the shapes of the states"
                raise matching.refusal(numbers_of(tree), model, f"{where}: {_called([label])}", why)
        if not names:
            numbers = {number: f"{at}/{number}" for number in (*tree[_STATE], *map(str, members(optimizer)))}
            numbered.append((label, renamed(tree, numbers)))
        renamed_trees.append(renamed(tree, names) if names else numbered[-1][1])
    if not numbered:
        return renamed_trees, Named()
    joined = {
        _STATE: {number: state for _, tree in numbered for number, state in tree[_STATE].items()},
        _GROUPS: [group for _, tree in numbered for group in tree[_GROUPS]],
    }
    others = {
        name
        for tree in renamed_trees
        if not any(tree is entry for _, entry in numbered)
        for name in (*tree[_STATE], *(name for group in tree[_GROUPS] for name in group["params"]))
    }
    left = {name: shape for name, shape in model.shapes.items() if name not in others}
    called = _called([label for label, _ in numbered])
    numbering = matching.named(numbers_of(joined), model._replace(shapes=left), f"{where}: {called}")
    others.update(numbering.names)
    return [renamed(_of(tree, others), numbering.names) for tree in renamed_trees], numbering


def attempted(numbers: Numbers, model: Model, reasons: list[str]) -> Named | None:
    """Return the names of numbers, and their source; if there is none, return None, and add why to `reasons`."""
    return matching.attempted(numbers, completed(model), reasons)


def _called(labels: Sequence[str]) -> str:
    """Return the optimizers under `labels` as messages call them."""
    under = " and ".join(dict.fromkeys(f"{label!r}" for label in labels if label))
    return f"the {'set of optimizers' if len(labels) > 1 else 'optimizer'}{f' under {under}' * bool(under)}"


def recorded_names(optimizer: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names that the groups of an optimizer record for its numbers; None if they record none."""
    groups = [group for group in listed(optimizer.get(_GROUPS)) if isinstance(group, Mapping)]
    numbers = [listed(group.get("params")) for group in groups]
    names = [listed(group.get("param_names")) for group in groups]
    if not groups or not any(names) or [*map(len, names)] != [*map(len, numbers)]:
        return None
    pairs = zip(numbers, names, strict=True)
    flat = [pair for group in pairs for pair in zip(*group, strict=True)]
    recorded = {name_of(number): name_of(name) for number, name in flat}
    if len(recorded) < sum(map(len, numbers)):
        return None
    return recorded if {*map(str, optimizer[_STATE])} <= recorded.keys() else None


def numbers_of(by_name: Mapping[str, Any]) -> Numbers:
    """Return the numbers of an optimizer, and the shapes of their parameters, as far as the states show them. `by_name`
    has the form of `by_parameter`."""
    shapes = {number: shape for number, state in by_name[_STATE].items() if (shape := _shape(state)) is not None}
    groups = [group["params"] for group in by_name[_GROUPS]]
    unlisted = by_name[_STATE].keys() - {number for group in groups for number in group}
    # MuonWithAuxAdam, Keller Jordan's and DeepSpeed's, sorts the parameters of such a group by size.
    is_sorted = [group.get("use_muon") is True for group in by_name[_GROUPS]]
    return Numbers(groups, {**dict.fromkeys(unlisted), **shapes}, is_sorted)


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter by its states; None if they have none, or several. Factored ones have shapes of
    their own, and the two factors of a square parameter look like states of a vector. bitsandbytes nests a dict.
    """
    if any(map(is_factor, state)):
        return None
    inner = [nested for nested in state.values() if isinstance(nested, Mapping)]
    state = {**state, **{key: value for nested in inner for key, value in nested.items()}}
    codes = state.get(_CODES)
    if isinstance(codes, LazyTensor):
        return codes.shape
    tensors = [value for key, value in state.items() if isinstance(value, LazyTensor) and key != _STEP]
    shapes = {tensor.shape for tensor in tensors if tensor.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _of(states: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the states and groups of the parameters in `names` alone."""
    groups = [{**group, "params": [name for name in group["params"] if name in names]} for group in states[_GROUPS]]
    return {_STATE: {name: state for name, state in states[_STATE].items() if name in names}, _GROUPS: groups}


def is_factor(key: Any) -> bool:
    """Return whether a state has the name of a factor, whose shape is not that of its parameter."""
    return str(key).endswith(_FACTORS)
