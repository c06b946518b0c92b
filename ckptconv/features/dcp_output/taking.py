"""The optimizer's states that a checkpoint of torch.distributed.checkpoint takes in addition to weights."""

from __future__ import annotations

from ckptconv.features.dcp_output.states import with_states
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.storage.paths import is_same

# The words of notes about states, and the words if these would go into the checkpoint of the weights.
_STATES_ARE_TAKEN = ("--optimizer PATH for", "--states PATH for")


def needs_states(options: Options, typed: str) -> bool:
    """Return whether to read the states of the checkpoint that was opened as `typed`."""
    return bool(options.states) and is_same(typed, options.states)


def fitted(source: Source, options: Options, typed: str) -> Source:
    """Return `source`, opened as `typed`, with the optimizer's states of the checkpoint that `options.states` names."""
    if options.states:
        source = with_states(source, typed, options.states, **options.opening(), **options.fitting())
    return source._replace(notes=[note.replace(*_STATES_ARE_TAKEN) for note in source.notes])
