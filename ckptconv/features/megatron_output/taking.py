"""The parts of a source that a step of Megatron-core takes in addition to weights."""

from __future__ import annotations

from ckptconv.features.dcp import taking
from ckptconv.formats import companions, configs
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.storage.location import Location

needs_states = taking.needs_states


def fitted(source: Source, options: Options, typed: str) -> Source:
    """Return `source`, opened as `typed`, with the configuration beside it, and with the optimizer's states of the
    checkpoint that `options.states` names."""
    source = taking.fitted(source, options, typed)
    beside = companions.siblings(source, options.storage_options, (companions.CONFIG,)).files
    if companions.CONFIG not in beside:
        return source
    place = Location(beside[companions.CONFIG].path, dict(options.storage_options))
    return source._replace(values={**source.values, companions.CONFIG: configs.read(place)})
