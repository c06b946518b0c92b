"""What a map says, and what it would make of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.formats.chosen_map import read_map
from ckptconv.formats.detect import open_source
from ckptconv.options.table import Options
from ckptconv.outputs.pipeline import selected
from ckptconv.storage.paths import normalize


@dataclass(frozen=True)
class MapCheck:
    """A map that is sound: its name, sides, number of rules, and the sizes that it lists.

    With a checkpoint: `made_of` has for each tensor to make the names of those that it is made of; `warnings` say what
    is left out.
    """

    map: str
    sides: tuple[str, str]
    rules: int
    sizes: tuple[str, ...]
    source: str = ""
    direction: tuple[str, str] | None = None
    made_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def check_map(named: str, source: str | None = None, **options: Any) -> MapCheck:
    """Return what the map called `named` says, and what it makes of the checkpoint at `source`.

    `options` are those of a conversion that choose and name tensors. Raise UsageError for a map that is none or does
    not fit, and whatever opening the checkpoint raises.
    """
    chosen = Options(map=named, **options)
    found = read_map(named, chosen.storage_options)
    told = MapCheck(found.name, found.sides, len(found.rules), tuple(found.sizes))
    if source is None:
        return told
    opened = open_source(normalize(source), key=chosen.key, **chosen.opening())
    result = selected(opened, chosen)
    applied = result.applied
    assert applied is not None
    return MapCheck(
        *(told.map, told.sides, told.rules, told.sizes, opened.path),
        (applied.source, applied.target),
        applied.sources,
        (*opened.warnings, *result.warnings),
    )
