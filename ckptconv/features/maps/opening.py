"""Gives a source a map when it is opened, if options ask for one, or the record of an output has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.maps.choosing import names_each_layer, tells_layers_apart, with_map
from ckptconv.features.maps.chosen import ChosenMap
from ckptconv.features.maps.options import MapOptions
from ckptconv.formats.source import Source, Wanted
from ckptconv.options.table import NONE


def _given(options: Mapping[str, Any]) -> MapOptions:
    return MapOptions(**{name: options[name] for name in MapOptions.table if name in options})


def _recorded(settings: Mapping[str, Any], options: MapOptions) -> ChosenMap | None:
    """Return the recorded map that made an output of the source, unless the options name one."""
    return None if options.map else settings.get("recorded")


def wanted(wanted: Wanted, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Wanted:
    """Return the parts to read for a map: each layer apart if the map has a name for each, and ranks' parts, which the
    map may join."""
    options = _given(settings)
    recorded = _recorded(settings, options)
    if options.map in ("", NONE) and recorded is None:
        return wanted
    apart = wanted.unstack
    if not apart:
        stores = reaching.get("storage_options") or {}
        apart = names_each_layer(recorded.map) if recorded else tells_layers_apart(options.map, stores)
    return wanted._replace(unstack=apart, parts=True)


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the map that `settings` name, or else the recorded one."""
    options = _given(settings)
    recorded = _recorded(settings, options)
    if recorded and "map" not in source.computed:
        source = source.computing(map=recorded)
    return with_map(source, options.map, options.size, reaching.get("storage_options") or {})
