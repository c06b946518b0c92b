"""The option of maps for `diff`, and the sizes that it takes from B."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptconv.features.maps.options import MapOptions
from ckptconv.structure.keymap import flatten
from ckptconv.text import some

if TYPE_CHECKING:
    from ckptconv.formats.source import Source

COMPARING = {
    "map": MapOptions.table["map"].explained(
        "Give the tensors of A the names and layouts of B, with a built-in map (`ckptconv maps`) or a file of rules.",
    )
}


def facing(a: Source, b: Source, stores: Mapping[str, object]) -> Source:
    """Return A for a comparison with B. Its map makes those alternatives that B has, and takes sizes from B's
    configuration if A has none."""
    chosen = a.computed.get("map")
    if chosen is None:
        return a
    from ckptconv.features.maps.choosing import configuration

    config = chosen.config or (configuration(b, stores) if chosen.map.asks_config else {})
    return a.computing(map=replace(chosen, config=config, wanted=flatten(b.weights)[0]))


def advice(a: Source, names: Collection[str], others: Collection[str]) -> Iterator[str]:
    """Yield a hint on maps, if the `names` that only A has and the `others` that only B has are their two sides."""
    if "map" not in a.computed:
        from ckptconv.features.maps.fitting import SHOWN, between

        if maps := between(names, others):
            one_of = "" if len(maps) == 1 else "one of "
            yield f"The tensors of A get the names of B with {one_of}--map {some(maps, SHOWN, str)}."
