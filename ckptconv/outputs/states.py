"""From a source and options to the optimizer states of an output, as `pipeline` selects its weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import computed
from ckptconv.outputs.naming import flattened
from ckptconv.outputs.pipeline import names_of, owners_of, with_metadata
from ckptconv.outputs.selected import Selected
from ckptconv.outputs.selection import Rename
from ckptconv.structure import keymap
from ckptconv.structure.choice import Choice
from ckptconv.structure.record import Flattened


def selected(source: Source, options: Options, rename: Rename) -> Selected:
    """Select the optimizer states by the options: named <parameter>.<state>, and nested as torch nests them.

    Parameters have the names of the weights. Half-precision states are widened by default, as the weights are, and
    never narrowed. `owners` are states shared with another parameter: {alias: owner}.
    """
    optimizer = source.states()
    if optimizer is None:
        raise UsageError(f"{source.path} contains no optimizer states by parameter.")
    choice = Choice(options.include, options.exclude)
    listed = (name for group in optimizer["param_groups"] for name in group["params"])
    known = dict.fromkeys([*flattened(source, source.weights, choice).tensors, *optimizer["state"], *listed])
    names = names_of(source, known, options, choice, rename)
    states = {names[name]: state for name, state in optimizer["state"].items() if name in names}
    groups = [
        {**group, "params": [names[name] for name in group["params"] if name in names]}
        for group in optimizer["param_groups"]
    ]
    ties = owners_of(source.owners, names)
    change = computed.restated(source, states, groups, ties)
    described = _flattened(change.states, change.groups) if change else _flattened(states, groups)
    owners = {}
    for alias, owner in ties.items() if options.tied == "alias" and not change else ():
        for key in states.get(owner, {}):
            kept, removed = f"{owner}.{key}", f"{alias}.{key}"
            if kept in described.tensors and removed not in described.tensors:
                owners[removed] = kept
    dtype = "keep" if options.dtype == "keep" else source.defaults.dtype
    chosen = Selected(
        names,
        known,
        described.tensors,
        described,
        options.structure,
        owners,
        choice,
        dtype,
        widen_only=True,
        equal=tuple(change.equal) if change else (),
        of_states=True,
        tied=True,
    )
    return with_metadata(change.noted(chosen, options) if change else chosen, {}, source.path)


def _flattened(states: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> Flattened:
    """Return an optimizer's `states` by parameter, and its param_groups, as tensors by name, and their structure
    record.

    The names are <parameter>.<state> for every format. The record has torch's own nesting, {"state": …, "param_groups":
    …}. Raise UnsupportedError if this gives two tensors one name.
    """
    described = keymap.describe({"state": states, "param_groups": groups})
    flat = described.tensors
    names = {name: name.removeprefix("state.") for name in flat}
    if len(set(names.values())) < len(names):
        odd = next(name for name, new in names.items() if name != new and new in flat)
        raise UnsupportedError(f"An optimizer state and an entry of its groups both have the name {names[odd]!r}.")
    return described._replace(
        tensors={names[name]: tensor for name, tensor in flat.items()},
        structure=keymap.remap(described.structure, names),
        uncastable=frozenset(names[name] for name in described.uncastable),
    )
