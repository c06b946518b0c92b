"""Reads the map that a user has chosen for a checkpoint, and the config.json next to it or next to its reference."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptconv.features.companions import reading
from ckptconv.features.companions.directory import PARAMS
from ckptconv.features.maps.chosen import ChosenMap, of_record
from ckptconv.features.maps.file import MAX_BYTES, SUFFIX, Map, catalogue, from_catalogue, parse_map
from ckptconv.formats.source import CONFIG, Source
from ckptconv.options.table import NONE
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, is_remote, normalize
from ckptconv.structure.record import MAP_KEY

# In the name of a tensor with all layers.
STACK = re.compile(r"layers\.(?![\d{])")


def with_map(source: Source, named: str, sizes: Mapping[str, int], options: Mapping[str, object]) -> Source:
    """Return `source` with the map called `named`; unchanged without one."""
    if named and named != NONE:
        return source.computing(map=choose_map(named, sizes, source, options))
    if sizes:
        return source._replace(warnings=[*source.warnings, "--size has no effect without --map."])
    return source


def choose_map(named: str, sizes: Mapping[str, int], source: Source, options: Mapping[str, object]) -> ChosenMap:
    """Return the map called `named`, for `source`. `NAME:SIDE` names the side to make.

    Raise UsageError for a map that does not exist, or is invalid.
    """
    name, side = _name_and_side(named)
    map_ = read_map(name, options)
    if side:
        map_.side(side)
    record = source.remarks.get(MAP_KEY)
    made_by = of_record(record, source.path) if record else None
    if made_by and made_by.map.text == map_.text:
        sizes = {**made_by.sizes, **sizes}
    config: Mapping[str, object] = {}
    if map_.asks_config:
        config = configuration(source, options) or (
            configuration(source.reference, options) if source.reference else {}
        )
    return ChosenMap(map_, dict(sizes), config, side)


def configuration(source: Source, options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration next to `source`: that of transformers, or else of Meta's Llama; {} if there is none."""
    return next((config.says for _, config in reading.configurations(source, options, CONFIG, PARAMS)), {})


def tells_layers_apart(named: str, options: Mapping[str, object]) -> bool:
    """Return whether the map called `named` has a name for each layer on both sides. Megatron-core stores all layers in
    one tensor.

    Raise UsageError for a map that does not exist, or is invalid.
    """
    return names_each_layer(read_map(_name_and_side(named)[0], options))


def names_each_layer(map_: Map) -> bool:
    """Return whether a map has a name for each layer on both sides."""
    sides = [[str(tensor.name) for rule in map_.rules for tensor in rule.sides[side]] for side in (0, 1)]
    return all(any("layers.{" in name for name in names) for names in sides) and not any(
        STACK.search(name) for names in sides for name in names
    )


def _name_and_side(named: str) -> tuple[str, str]:
    name, _, side = named.rpartition(":")
    if not name or "/" in side or (side.endswith(SUFFIX) and not name.endswith(SUFFIX)):
        return named, ""
    return name, side


def read_map(named: str, options: Mapping[str, object]) -> Map:
    """Return the map called `named`: a built-in one, or a file on a disk or a store."""
    named = normalize(named)
    is_path = is_remote(named) or "/" in named or named.endswith(SUFFIX)
    if not is_path and named in catalogue():
        return from_catalogue(named)
    place = Location(named, dict(options))
    if place.kind != "file":
        if is_path:
            place.check_file(f"The map {named}")
        return from_catalogue(named)
    return parse_map(place.read_text(MAX_BYTES), basename(named))
