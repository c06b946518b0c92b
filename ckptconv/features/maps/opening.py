"""A source is opened with a map, if options ask for one, or the record of an output does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.maps.choosing import names_each_layer, tells_layers_apart, with_map
from ckptconv.features.maps.chosen import ChosenMap
from ckptconv.features.maps.options import MapOptions
from ckptconv.formats.source import Source, Wanted
from ckptconv.options.table import NONE


def _given(asked: Mapping[str, Any]) -> MapOptions:
    return MapOptions(**{name: asked[name] for name in MapOptions.table if name in asked})


def _recorded(asked: Mapping[str, Any], options: MapOptions) -> ChosenMap | None:
    """Return the map that was taken when an output was made of the source, for where the options name none."""
    return None if options.map else asked.get("recorded")


def wanted(wanted: Wanted, asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> Wanted:
    """Return what is to be read for a map: each layer apart if it has a name for each, and ranks' parts, which it may
    join."""
    options = _given(asked)
    recorded = _recorded(asked, options)
    if options.map in ("", NONE) and recorded is None:
        return wanted
    apart = wanted.unstack
    if not apart:
        stores = reaching.get("storage_options") or {}
        apart = names_each_layer(recorded.map) if recorded else tells_layers_apart(options.map, stores)
    return wanted._replace(unstack=apart, parts=True)


def opened(source: Source, asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the map that the options `asked` name, or else the recorded one."""
    options = _given(asked)
    recorded = _recorded(asked, options)
    if recorded and "map" not in source.computed:
        source = source.computing(map=recorded)
    return with_map(source, options.map, options.size, reaching.get("storage_options") or {})
