"""The parts of a source that a step of Megatron-core takes in addition to weights."""

from __future__ import annotations

from ckptconv.features.dcp import taking
from ckptconv.formats.companions import configurations
from ckptconv.formats.model_directory import CONFIG
from ckptconv.formats.source import Source
from ckptconv.options.table import Options

needs_states = taking.needs_states


def fitted(source: Source, options: Options, typed: str) -> Source:
    """Return `source`, opened as `typed`, with the configuration beside it, and with the optimizer's states of the
    checkpoint that `options.states` names."""
    source = taking.fitted(source, options, typed)
    beside = configurations(source, options.storage_options, CONFIG)
    values = {name: dict(configuration.says) for name, configuration in beside}
    return source._replace(values={**source.values, **values}) if values else source
