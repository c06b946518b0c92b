"""A map's summary, and a check of a map on a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.features.maps.choosing import read_map
from ckptconv.features.maps.claims import precedences
from ckptconv.features.maps.file import Map
from ckptconv.formats.detect import open_source
from ckptconv.options.table import Options
from ckptconv.outputs.pipeline import selected
from ckptconv.storage.paths import normalize


@dataclass(frozen=True)
class MapSummary:
    """A map."""

    name: str
    """The name of the map, or of its file."""

    about: str
    """The purpose of the map; "" if the map states none."""

    sides: tuple[str, str]
    """The names of its two sides."""

    rules: int
    """Number of rules, counting each alternative."""

    sizes: tuple[str, ...]
    """The axes whose sizes it lists."""

    sha256: str
    """The digest of its text."""


@dataclass(frozen=True)
class MapCheck:
    """A map, and its result for a checkpoint if there is one.

    `precedence` has pairs of rules: the first has the names that both have, as it is more special. `made_of` has the
    input names of each output tensor; `warnings` name the tensors that are left out.
    """

    map: MapSummary
    precedence: Sequence[tuple[str, str]] = ()
    source: str = ""
    direction: tuple[str, str] | None = None
    made_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def summarized(map_: Map) -> MapSummary:
    """Return what `map_` says of itself."""
    return MapSummary(map_.name, map_.about, map_.sides, len(map_.rules), tuple(map_.sizes), map_.digest)


def check_map(named: str, source: str | None = None, **options: Any) -> MapCheck:
    """Return the summary of the map called `named`, and its result for the checkpoint at `source`.

    `options` are those of a conversion that choose and name tensors. Raise UsageError for a map that is none or does
    not fit, and whatever opening the checkpoint raises.
    """
    chosen = Options(map=named, **options)
    map_ = read_map(named, chosen.storage_options)
    precedence = [(first.where, second.where) for first, second in precedences(map_)]
    if source is None:
        return MapCheck(summarized(map_), precedence)
    opened = open_source(normalize(source), key=chosen.key, **chosen.opening(), **chosen.fitting())
    result = selected(opened, chosen)
    applied = result.applied
    assert applied is not None
    return MapCheck(
        summarized(map_),
        precedence,
        opened.path,
        (applied.source, applied.target),
        applied.sources,
        (*opened.warnings, *result.warnings),
    )
