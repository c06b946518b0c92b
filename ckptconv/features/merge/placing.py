"""The places in a base of the tensors that an adapter names by their names in memory. Pure.

A base may have these names, those that transformers' files have for them (`memory`), or either of them below another
module or without the first one, because models are saved with and without a head. One way must hold for the whole
adapter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ckptconv.errors import UnsupportedError
from ckptconv.features.merge.files import Adapter
from ckptconv.features.merge.memory import Family, InFiles, families
from ckptconv.features.merge.peft import Module
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import brief

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# The most modules at the top of a model: it has few.
_MOST_BEGINS = 16

# The place of a parameter: these names, one of these stacks, or none.
_Where: TypeAlias = "InFiles | dict[str, list[list[str]]] | None"


class Placed(NamedTuple):
    """The places of an adapter's tensors in a base: {name in memory: names there}; and the stacks of modules without a
    weight, {module: {stack: the tensors of each expert}}; a single tensor is the stack itself."""

    tensors: Mapping[str, InFiles]
    stacks: Mapping[str, Mapping[str, Sequence[Sequence[str]]]]
    others: tuple[Family, ...]

    def stacked(self, module: str, parameter: str) -> Sequence[Sequence[str]]:
        """Return the tensors of each expert of a stack of `module`; none if there is no stack of that name."""
        return self.stacks.get(module, {}).get(parameter, ())

    @property
    def is_empty(self) -> bool:
        """Whether the base has no place for any tensor."""
        return not self.tensors and not self.stacks

    def has_other_layout(self, memory: str, kind: object) -> bool:
        """Return whether files of such models, of the type `kind` if it is known, store a tensor in another layout than
        memory has."""
        others = [family for family in self.others if (kind in family.called if kind else not self.is_empty)]
        return any(family.has_other_layout(memory) for family in others)


class _Way:
    """A way to find tensors in a base: by the names of a `family`, or by their own names; after any `change`."""

    def __init__(self, base: _Names, family: Family | None = None, change: Callable[[str], str] | None = None) -> None:
        self._base, self.family, self._change = base, family, change

    def place(self, memory: str) -> InFiles | None:
        """Return the place of the tensor, if it is there, and no stack."""
        return next(
            (
                candidate
                for candidate in self._candidates(memory)
                if not candidate.stacked and self._has(candidate.names)
            ),
            None,
        )

    def _candidates(self, memory: str) -> Iterator[InFiles]:
        yield InFiles((memory,))
        if self._change:
            yield InFiles((self._change(memory),))
        if self.family:
            yield from self.family.in_files(memory)

    def _is_stack(self, names: Sequence[str]) -> bool:
        return len(names) == 1 and self._has(names) and len(self._base.tensors[names[0]].shape) == 3

    def _has(self, names: Iterable[str]) -> bool:
        return all(name in self._base.tensors for name in names)

    def stacks(self, module: str) -> dict[str, list[list[str]]]:
        """Return the stacks of a module."""
        stacks: dict[str, list[list[str]]] = {}
        for named in dict.fromkeys((module, self._change(module) if self._change else module)):
            for stack in self._base.stored.get(named, ()):
                stacks[stack] = [[f"{named}.{stack}"]]
        for stack in self.family.stacks_of(module) if self.family else ():
            for candidate in self.family.in_files(f"{module}.{stack}") if self.family else ():
                if candidate.stacked and stack not in stacks:
                    every = (list(candidate.of_expert(number)) for number in itertools.count())
                    if experts := [*itertools.takewhile(self._has, every)]:
                        stacks[stack] = experts
                elif stack not in stacks and self._is_stack(candidate.names):
                    stacks[stack] = [[candidate.names[0]]]
        return stacks


class _Names:
    """The tensors of a base, by name, and the stacks by module."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self.tensors = tensors
        self.stored: dict[str, list[str]] = {}
        for name, tensor in tensors.items():
            if len(tensor.shape) == 3:
                module, _, stack = name.rpartition(".")
                self.stored.setdefault(module, []).append(stack)


def placed(adapter: Adapter, tensors: Mapping[str, LazyTensor], path: str, modules: Mapping[str, Module]) -> Placed:
    """Return the places of the `modules` of an adapter among the `tensors` of the base at `path`.

    Raise UnsupportedError if two places are possible.
    """
    base = _Names(tensors)
    wanted = [*_wanted(modules)]
    ways = [_Way(base)]
    results = [_found(ways[0], wanted)]
    if any(place is None for place in results[0]):
        some_of_each = [*{_NUMBER.sub("*", memory): (module, memory) for module, memory in reversed(wanted)}.values()]
        ways = [*ways, *_others(base)]
        hits = [sum(place is not None for place in _found(way, some_of_each)) for way in ways]
        ways = [way for way, number in zip(ways, hits, strict=True) if number == max(hits)]
        ways = ways[:1] if hits[0] == max(hits) else ways
        results = [_found(way, wanted) for way in ways]
    best = max(map(_score, results))
    kept = [number for number, result in enumerate(results) if _score(result) == best]
    first = results[kept[0]]
    for number in kept[1:]:
        for (_, memory), expected, rival in zip(wanted, first, results[number], strict=True):
            if expected != rival:
                raise UnsupportedError(
                    f"{adapter.source.path}: {brief(memory, 200)} is ambiguous: it may be {_shown(expected)} or "
                    f"{_shown(rival)} of {path}, because several model families use such names.",
                    "Give the tensors of the base the names that the model uses in memory, with --rename or --map.",
                )
    places = {memory: place for (_, memory), place in zip(wanted, first, strict=True) if isinstance(place, InFiles)}
    stacks = {}
    for (module, memory), place in zip(wanted, first, strict=True):
        if isinstance(place, dict):
            stacks[module if memory == f"{module}.weight" else memory.rpartition(".")[0]] = place
    chosen = ways[kept[0]]
    others = tuple(way.family for way in ways if way.family) or ((chosen.family,) if chosen.family else families())
    return Placed(places, stacks, others)


def _score(places: Iterable[_Where]) -> tuple[int, int]:
    """Return the number of parameters with a place, and the number of tensors in the stacks."""
    every = [place for place in places if place is not None]
    stacks = [stack for place in every if isinstance(place, dict) for stack in place.values()]
    return len(every), sum(len(names) for stack in stacks for names in stack)


def _shown(place: _Where) -> str:
    if isinstance(place, InFiles):
        return " and ".join(map(repr, place.names))
    return "stacked" if place else "nothing"


def _wanted(modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that an adapter changes: their modules, and their names in memory."""
    for module, parts in modules.items():
        names = dict.fromkeys(f"{module}.{parameter}" for parameter in parts.whole)
        if parts.factors or parts.rows is not None:
            names[f"{module}.{parts.parameter}"] = None
        if any(pair.bias is not None for pair in parts.factors):
            names[f"{module}.bias"] = None
        yield from ((module, name) for name in names)


def _found(way: _Way, wanted: Iterable[tuple[str, str]]) -> list[_Where]:
    """Return the place of each parameter, or the stacks of its module if it is one of them, or may be."""
    places: list[_Where] = []
    known: dict[str, dict[str, list[list[str]]]] = {}
    for module, memory in wanted:
        place = way.place(memory)
        if place is None and module not in known:
            known[module] = way.stacks(module)
        parameter = memory.rpartition(".")[2]
        has_stack = place is None and (parameter in known[module] or (parameter == "weight" and known[module]))
        places.append(known[module] if has_stack else place)
    return places


def _others(base: _Names) -> Iterator[_Way]:
    """Yield the ways to find tensors under other names than their own."""
    yield _Way(base, change=lambda name: name.partition(".")[2])
    begins = dict.fromkeys(name.partition(".")[0] for name in base.tensors)
    for begin in begins if len(begins) <= _MOST_BEGINS else ():
        yield _Way(base, change=lambda name, begin=begin: f"{begin}.{name}")  # type: ignore[misc]
    for family in families():
        yield _Way(base, family)
