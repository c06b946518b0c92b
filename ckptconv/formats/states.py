"""Take the optimizer's states of a model from another checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats.detect import complete, open_source
from ckptconv.formats.source import Source
from ckptconv.storage.paths import basename, normalize, resolved_name


def with_states(source: Source, asked: str, path: str, **settings: Any) -> Source:
    """Return `source`, which was opened as `asked`, with the optimizer's states of the checkpoint at `path`.

    That is what a conversion with --optimizer has written there, or any checkpoint that has them by parameter name, the
    source itself for one. `settings` are those of `open_source`. Raise UsageError if there are no such states.
    """
    if is_same(asked, path) or is_same(source.path, path):
        source = complete(source, states=True, inert=settings.get("inert", False))
        if source.states() is None:
            raise _none(path)
        return source
    # Which checkpoint to take, and the layout of the output, are said of the source.
    of_source = {"family": "", "tag": "", "like": "", "map": "", "size": None, "alone": False}
    other = open_source(normalize(path), **{**settings, **of_source, "states": True})
    found = other.states()
    if found is None:
        other.check_weights()
        found = _states_in(other.weights)
    if found is None:
        raise _none(path)
    named = {f"{basename(other.path)}/{name}": what for name, what in {**other.inputs, **other.state_inputs}.items()}
    return replace(
        source,
        optimizer=found,
        states_error=None,
        equal_states=other.equal_states,
        alike_states=other.alike_states,
        warnings=[*source.warnings, *other.warnings],
        opaque=list(dict.fromkeys([*source.opaque, *other.opaque])),
        mentioned=list(dict.fromkeys([*source.mentioned, *other.mentioned])),
        records={**source.records, **other.records},
        state_inputs={**source.state_inputs, **named},
        bytes_read=source.bytes_read + other.bytes_read,
    )


def is_same(one: str, other: str) -> bool:
    """Whether two paths or URLs are of the same place."""
    return resolved_name(normalize(one)) == resolved_name(normalize(other))


def _states_in(tree: Any) -> dict[str, Any] | None:
    """Return the optimizer's state dict that `tree` is, if its parameters have names; else None."""
    states = tree.get("state") if isinstance(tree, Mapping) else None
    if not isinstance(states, Mapping) or not states or not isinstance(tree, Mapping):
        return None
    groups = tree.get("param_groups", [])
    is_sound = isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)
    are_named = all(type(name) is str and isinstance(state, Mapping) for name, state in states.items())
    if not is_sound or not are_named:
        return None
    return {"state": dict(states), "param_groups": [dict(group) for group in groups]}


def _none(path: str) -> UsageError:
    return UsageError(
        f"{path} holds no optimizer states that can be named by parameter. Nothing was written.",
        "Give what a conversion with --optimizer wrote, or a checkpoint that has them.",
    )
