"""The parts of a source that a step of Megatron-core takes in addition to weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.companions.reading import configurations
from ckptconv.features.dcp_output import taking
from ckptconv.formats.source import CONFIG, Source
from ckptconv.formats.values import number_in
from ckptconv.options.table import Options
from ckptconv.process import of_feature

needs_states = taking.needs_states
_STEP = "step"
# Features that fit a source to a step: `taking.py` in the folder has `fitted(source, options)`.
FITTED = ("megatron_adapters",)


def fitted(source: Source, options: Options, typed: str) -> Source:
    """Return `source`, opened as `typed`, with the configuration next to it, and with the optimizer's states of the
    checkpoint that `options.states` names."""
    source = taking.fitted(source, options, typed)
    if options.states and source.optimizer is not None:
        source = source._replace(optimizer=_with_steps(source.optimizer, options.storage_options))
    for module in filter(None, (of_feature(feature, "taking") for feature in FITTED)):
        source = module.fitted(source, options)
    beside = configurations(source, options.storage_options, CONFIG)
    values = {name: dict(configuration.says) for name, configuration in beside}
    return source._replace(values={**source.values, **values}) if values else source


def _with_steps(optimizer: Mapping[str, Any], stores: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's states and groups with the steps of parameters as numbers, read from their files."""
    states = {
        name: {**state, _STEP: _number(state[_STEP], stores)} if _STEP in state else state
        for name, state in optimizer["state"].items()
    }
    return {**optimizer, "state": states}


def _number(value: Any, stores: Mapping[str, Any]) -> Any:
    number = number_in(value, stores)
    return int(number) if number is not value and number == int(number) else number
