"""The option of maps for `diff`, and the sizes that it takes from B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptconv.features.maps.options import MapOptions

if TYPE_CHECKING:
    from ckptconv.formats.source import Source

COMPARING = {
    "map": MapOptions.table["map"].explained(
        "Give the tensors of A the names and layouts of B, with a built-in map (`ckptconv maps`) or a file of rules.",
    )
}


def facing(a: Source, b: Source, stores: Mapping[str, object]) -> Source:
    """Return A for a comparison with B. Its map takes sizes from B's configuration if A has none."""
    chosen = a.computed.get("map")
    if chosen is None or not chosen.map.asks_config or chosen.config:
        return a
    from ckptconv.features.maps.choosing import configuration

    return a.computing(map=replace(chosen, config=configuration(b, stores)))
