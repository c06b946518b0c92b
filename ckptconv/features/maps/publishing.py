"""Recognize by the built-in maps an output with the names of another program than transformers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.maps.choosing import STACK
from ckptconv.features.maps.claims import Templates
from ckptconv.features.maps.fitting import SHOWN, examples_of, maps_like
from ckptconv.formats.source import OPEN_CLIP
from ckptconv.outputs.truths import Weights
from ckptconv.text import quoted, some

# The sides of maps that have the names of transformers: of its files, and of its releases 4 and 5 in memory.
_TRANSFORMERS = ("hf", "v4", "v5")


class Foreign(NamedTuple):
    """Names of another program: an example, and the maps that have most of them, by name, with their sides."""

    example: str
    maps: dict[str, str]


def untrue(config: Mapping[str, Any] | None, weights: Weights) -> Iterator[str]:
    """Yield a warning if an output with a configuration of transformers, or to publish, has another program's names.

    Raise UsageError if it has both. Code beside a model may give it any names, and open_clip has names of its own.
    """
    if weights.stem == OPEN_CLIP:
        return
    if config is not None and ("model_type" not in config or config.get("auto_map")):
        return
    foreign = foreign_names(weights.tensors)
    if foreign is None or _is_component(foreign.example, weights.before):
        return
    programs = " or ".join(dict.fromkeys(foreign.maps.values()))
    fact = f"The output has names of {programs}, such as {quoted(foreign.example)}"
    advice = f"Give the map of its architecture: --map {some(foreign.maps, SHOWN, str)} (ckptconv maps lists them)."
    if config is None:
        yield f"{fact}, which transformers does not load. {advice}"
    elif weights.publishing:
        raise UsageError(
            f"{fact}, but a config.json for transformers, which would not find these weights.",
            f"{advice} To keep these names, use --no-copy-config.",
        )
    else:
        yield f"{fact}, but a config.json for transformers, which would not find these weights. {advice}"


def _is_component(name: str, before: Collection[str]) -> bool:
    """Return whether `name` is one module of a larger model, whose names are `before`: programs differ in such
    names."""
    outer = {whole.removesuffix(name) for whole in before if whole.endswith(f".{name}")}
    return len(outer) == 1 and not all(whole.startswith(tuple(outer)) for whole in before)


def foreign_names(names: Collection[str]) -> Foreign | None:
    """Return the program whose names most of `names` are, by the built-in maps; None if transformers has as many."""
    examples = examples_of((STACK.sub("layers.0.", name), name) for name in names)
    most, own = len(examples) // 2, 0
    foreign = Foreign("", {})
    for map_ in maps_like(examples):
        for number, side in enumerate(map_.sides):
            templates = Templates(map_, number)
            fitting = [name for name in examples if templates.has(name)]
            if side in _TRANSFORMERS:
                own = max(own, len(fitting))
            elif len(fitting) > most:
                most, foreign = len(fitting), Foreign(examples[fitting[0]], {map_.name: side})
            elif foreign.maps and len(fitting) == most:
                foreign.maps[map_.name] = side
        if own == len(examples):
            return None
    return foreign if foreign.maps and most > own else None
