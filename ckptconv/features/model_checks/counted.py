"""Compare the numbers of layers and experts in a configuration with the names in an output. Pure.

No model is known by name. A module called `N` in another is one of a number of modules. A value of a configuration
under a key about layers, or about experts, counts them if it is their number in the source, or has an entry for each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptconv.text import some

_NUMBERED = re.compile(r"\.(\d{1,6})(?=\.)")
# The words by which a key of a configuration counts modules, and modules are called that it may count.
_LAYERS, _EXPERTS = ("layer", "depth", "block"), ("expert",)
# Layers that predict further tokens: their names go on behind those of the others.
_FURTHER = "num_nextn_predict_layers"


def contradicted(config: Mapping[str, Any], before: Iterable[str], after: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each number in `config` that is not the output's: `before` are the names of a source's
    tensors, and `after` those of them that the output has."""
    kept = _modules(after)
    counts = list(_counts(config))
    further = sum(count for key, count in counts if key.endswith(_FURTHER))
    places_of: dict[tuple[str, ...], list[str]] = {}
    for place, numbers in _modules(before).items():
        left = numbers - kept[place]
        outer = _outer(place)
        if not left or (outer and outer[1] not in kept[outer[0]]):
            continue  # all are present, or a warning names the module that contains them
        words = _EXPERTS if "expert" in place.rpartition(".")[2] else _LAYERS
        wrong = tuple(
            f"{key} {count}"
            for key, count in counts
            if any(word in key.rpartition(".")[2] for word in words) and _counted(key, count, numbers, left, further)
        )
        if wrong:
            places_of.setdefault(wrong, []).append(f"{len(numbers) - len(left)} of {len(numbers)} {place}.N")
    for wrong, places in places_of.items():
        yield (
            f"config.json has {some(wrong, form=str)}, but the output has {some(places, 2, str)}. Correct config.json "
            "before loading the output, or use --layers and --experts, which change config.json."
        )


def _counted(key: str, count: int, numbers: frozenset[int], left: frozenset[int], further: int) -> bool:
    """Return whether a count is that of modules with these `numbers`, of which some are `left` out."""
    if key.endswith(_FURTHER):
        return bool(left & {*sorted(numbers)[-count:]}) if count else False
    return count in (len(numbers), len(numbers) - further) and bool(left & {*sorted(numbers)[:count]})


def _modules(names: Iterable[str]) -> defaultdict[str, frozenset[int]]:
    """Return the numbers of modules by the name of the module that they are in."""
    modules: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        for match in _NUMBERED.finditer(name):
            modules[name[: match.start()]].add(int(match[1]))
    return defaultdict(frozenset, {place: frozenset(numbers) for place, numbers in modules.items()})


def _outer(place: str) -> tuple[str, int] | None:
    """Return the numbered module that a place is in: where that is, and its number."""
    inside = list(_NUMBERED.finditer(place))
    return (place[: inside[-1].start()], int(inside[-1][1])) if inside else None


def _counts(config: Any, at: str = "") -> Iterator[tuple[str, int]]:
    """Yield possible counts in a configuration, by key at any depth: numbers, and lists with an entry for each."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value, f"{at}{key}.")
        elif type(value) is int and 0 < value < 1 << 20:
            yield f"{at}{key}", value
        elif isinstance(value, list) and value:
            yield f"{at}{key}", len(value)
