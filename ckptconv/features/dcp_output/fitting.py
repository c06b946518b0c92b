"""Compares optimizer states that have names with the weights that they are to belong to: names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import UnsupportedError
from ckptconv.features.optimizer_states.states import STATISTICS
from ckptconv.features.optimizer_states.training import weights_in
from ckptconv.formats.source import Source
from ckptconv.tensors.dtypes import SUMMED
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import count_of, some

# States that have the shape of their parameter. Those of a projection have only one of its sides.
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_OTHERS = "Give the states that were saved with these weights."


def checked_fit(source: Source, optimizer: Mapping[str, Any], path: str) -> Source:
    """Return `source` with a warning if states in `optimizer`, which was read from `path`, belong to none of its
    weights, or have other shapes. Raise UnsupportedError if none belongs to any, or a shape cannot be that of one."""
    states = optimizer["state"]
    if source.wanted.key == "." or not states:
        return source  # names of a whole state have the keys above the weights
    weights: dict[str, Any] = dict(weights_in(source, source.wanted.key))
    weights |= {alias: weights[owner] for alias, owner in source.owners.items() if owner in weights}
    strangers = [name for name in states if name not in weights]
    if len(strangers) == len(states):
        raise UnsupportedError(
            f"{path} has the optimizer states of another model: the states belong to {some(strangers, 2)}, but "
            f"{source.path} has {some(list(weights), 2)}.",
            _OTHERS,
        )
    warnings = []
    if strangers:
        warnings.append(
            f"{path} has optimizer states of {count_of(len(strangers), 'parameter')} that {source.path} lacks: "
            f"{some(strangers)}."
        )
    if source.path != path and (others := list(_unlisted(source, optimizer, weights))):
        warnings.append(
            f"{path} does not list the parameters {some(others)}: these weights of {source.path} get no "
            "optimizer states, even with --fill-states. torch's strict load requires states for trained parameters."
        )
    unlike = list(_unlike({name: state for name, state in states.items() if name in weights}, weights))
    if wrong := next((text for text, is_side in unlike if not is_side), ""):
        raise UnsupportedError(f"{path}: {wrong}.", _OTHERS)
    shapes = [f"optimizer states in {path} do not have the shapes of their weights: {text}." for text, _ in unlike[:1]]
    return source._replace(warnings=[*source.warnings, *warnings, *shapes])


def _unlisted(source: Source, optimizer: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of floating-point weights for which an optimizer has neither states nor a group."""
    grouped = (name for group in optimizer.get("param_groups", ()) for name in group.get("params", ()))
    listed = {source.owners.get(name, name) for name in (*optimizer["state"], *grouped)}
    for name, weight in weights.items():
        is_float = isinstance(weight, LazyTensor) and weight.dtype.name in SUMMED
        if is_float and source.owners.get(name, name) not in listed and not name.endswith(STATISTICS):
            yield name


def _unlike(states: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield a sentence on each state that has another shape than its weight, and whether they have a side in common."""
    for name, state in states.items():
        for key in _SHAPED:
            value, weight = state.get(key), weights[name]
            if isinstance(value, LazyTensor) and isinstance(weight, LazyTensor) and value.shape != weight.shape:
                text = f"{key!r} of {name!r} has the shape {list(value.shape)}, but its weight has {list(weight.shape)}"
                yield text, bool(set(value.shape) & set(weight.shape))
