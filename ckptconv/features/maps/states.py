"""Applies a map to an optimizer's states: those laid out like their parameter go with it, scalars are copied. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.maps.chosen import ChosenMap
from ckptconv.features.maps.compile import Applied
from ckptconv.tensors.lazy import Equal, LazyTensor, same_bytes, untagged
from ckptconv.text import quoted, some


class MappedStates(NamedTuple):
    """States by the parameters of the other side, the groups of these, and the input parameters of each.

    `equal` are pairs of scalars, only one of which was kept, by name: they must be equal.
    """

    states: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    applied: Applied
    equal: list[Equal]


def apply_to_states(
    map_: ChosenMap, states: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> MappedStates:
    """Return the result of `map_` for the `states` of parameters, {parameter: {state: value}}, and for their `groups`.

    Raise the errors of `apply_map`, CorruptError for scalars that differ although their parameters become one, and
    UnsupportedError if there is no state of a parameter's shape, or if the map computes weights.
    """
    keys = list(dict.fromkeys(key for state in states.values() for key in state))
    laid_out = [key for key in keys if any(_is_laid_out(state.get(key)) for state in states.values())]
    mapped: dict[str, dict[str, Any]] = {}
    applied = None
    equal: list[Equal] = []
    for key in laid_out:
        tensors = {
            name: untagged(state[key]) for name, state in states.items() if isinstance(state.get(key), LazyTensor)
        }
        result = map_.apply(tensors)
        equal += ((f"{name}.{key}", kept, other) for name, kept, other in result.equal)
        if applied is None:
            applied, map_ = result, replace(map_, sizes=result.sizes, target=result.target)
        for name, tensor in result.tensors.items():
            mapped.setdefault(name, {})[key] = tensor
        applied.sources.update((name, of) for name, of in result.sources.items() if name not in applied.sources)
    if applied is None:
        raise UnsupportedError("The optimizer has no states in the layout of its parameters, so a map has no effect.")
    if applied.computed:
        raise UnsupportedError(
            f"The map {map_.map.name} computes new values for {some(applied.computed)}, and has no rules for the "
            "optimizer states of these weights.",
            "Convert only the model.",
        )
    for key in keys:
        for name, sources in applied.sources.items() if key not in laid_out else ():
            values = {source: states[source][key] for source in sources if key in states[source]}
            if values:
                mapped[name][key] = _one_of(f"{name}.{key}", values, equal)
    # The states of a parameter keep their order.
    ordered = {name: {key: state[key] for key in keys if key in state} for name, state in mapped.items()}
    return MappedStates(ordered, _grouped(groups, applied), applied, equal)


def _is_laid_out(value: Any) -> bool:
    return isinstance(value, LazyTensor) and value.numel > 1


def _one_of(name: str, values: Mapping[str, Any], equal: list[Equal]) -> Any:
    """Return the common value; if it is in the files, add the values to compare to `equal`."""
    (first, kept), *others = values.items()
    for source, value in others:
        if isinstance(kept, LazyTensor) and isinstance(value, LazyTensor) and kept.dtype == value.dtype:
            if same_bytes(kept) is None or same_bytes(kept) != same_bytes(value):
                equal.append((name, untagged(kept), untagged(value)))
        elif isinstance(kept, LazyTensor) or isinstance(value, LazyTensor) or kept != value:
            raise CorruptError(
                f"{quoted(name)} needs {some(values)}, but {quoted(source)} and {quoted(first)} have different values."
            )
    return kept


def _grouped(groups: Sequence[Mapping[str, Any]], applied: Applied) -> list[dict[str, Any]]:
    """Return the groups with the new names; a new parameter is in the group of all parameters from which it is made."""
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    params: list[list[str]] = [[] for _ in groups]
    for name, sources in applied.sources.items():
        numbers = {group_of[source] for source in sources if source in group_of}
        if len(numbers) > 1:
            raise CorruptError(f"{quoted(name)} needs {some(sources)}, which are in different groups of the optimizer.")
        for number in numbers:
            params[number].append(name)
    return [{**group, "params": names} for group, names in zip(groups, params, strict=True)]
