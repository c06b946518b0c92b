"""Finds the built-in maps that have given names. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator

from ckptconv.features.maps.claims import Claims, Templates, lacking
from ckptconv.features.maps.file import Map, catalogue, from_catalogue, matches, text_of
from ckptconv.text import some

# Names that differ only in numbers are one.
_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")
# Maps that a message proposes.
SHOWN = 12


def examples_of(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the first name of each form, a name with 0 for each number, of pairs of the text of a form and a name."""
    examples: dict[str, str] = {}
    for text, name in names:
        examples.setdefault(_NUMBERS.sub("0", text), name)
    return examples


def maps_like(names: Collection[str]) -> Iterator[Map]:
    """Yield the built-in maps whose text has all words of one of `names`, which have 0 for each number."""
    words = {tuple(name.split("0")) for name in names}
    for name in catalogue():
        text = text_of(name)
        if any(all(word in text for word in parts) for parts in words):
            yield from_catalogue(name)


def fitting(names: Iterable[str], but: str) -> list[str]:
    """Return the built-in maps, without the one called `but`, that have all of `names` on one side, and no required
    rule that has none of them."""
    examples = examples_of((name, name) for name in names)
    return [map_.name for map_ in maps_like(examples) if map_.name != but and _has_all(map_, [*examples.values()])]


def prefix_before(names: Iterable[str], map_: Map) -> str:
    """Return the longest prefix of all `names`, up to a dot, without which a map has them all; "" if there is none."""
    examples = [*examples_of((name, name) for name in names).values()]
    shared = os.path.commonprefix(examples)  # noqa: RUF071
    prefixes = (shared[: dot.end()] for dot in re.finditer(r"\.", shared))
    fit = (prefix for prefix in prefixes if _has_all(map_, [name.removeprefix(prefix) for name in examples]))
    return max(fit, key=len, default="")


def between(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the built-in maps that have all of `names` on one side, and all of the `others` on the other side, with a
    rule for some of each: a map also keeps names, and drops some."""
    ours, theirs = (list(examples_of((name, name) for name in given).values()) for given in (names, others))
    maps = maps_like(examples_of((name, name) for name in ours)) if ours and theirs else ()
    return [
        map_.name
        for map_ in maps
        if any(_has(map_, at, ours, True) and _has(map_, 1 - at, theirs, True) for at in (0, 1))
    ]


def _has_all(map_: Map, names: list[str]) -> bool:
    side = next((side for side in (0, 1) if _has(map_, side, names)), None)
    if side is None:
        return False
    claims_of = Templates(map_, side).claims(names, ())
    claims = Claims({name: claims[0] for name, claims in claims_of.items() if claims}, {}, {})
    return not lacking(map_, side, claims)


def _has(map_: Map, side: int, names: list[str], by_rule: bool = False) -> bool:
    """Return whether a side of a map has all names, with `by_rule` one of them by a rule."""
    claims_of = Templates(map_, side).claims(names, ())
    if by_rule and not any(claims_of[name] for name in names):
        return False
    return all(claims_of[name] or matches(name, (*map_.keep[side], *map_.drop[side])) for name in names)


def names_of_maps(names: Collection[str]) -> str:
    """Return a sentence on the maps that fit."""
    if not names:
        return "No other built-in map matches all of the names."
    return f"Built-in maps that match all of the names: {some(names, SHOWN, str)} (ckptconv maps lists them)."
