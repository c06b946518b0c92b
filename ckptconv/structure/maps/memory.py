"""What files call the tensors that transformers holds under other names, by the maps of the catalogue.

transformers 5 has all experts of a layer in one tensor where files have one for each, and PEFT names what it adapts as
the model in memory does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.structure.maps.file import catalogue, from_catalogue
from ckptconv.structure.maps.notation import Name, Rule, written

_MEMORY, _FILES = "v5", "v4"


class InFiles(NamedTuple):
    """The names in files of what one tensor in memory consists of. If `stack` is an index of these, there is one of
    each for every index of the first dimension, and their rows are one after the other along the second."""

    names: tuple[Name, ...]
    stack: str


class _Ending(NamedTuple):
    """How names in memory end, and those in files behind what both begin with."""

    memory: str
    files: InFiles


@functools.cache
def _endings() -> tuple[_Ending, ...]:
    found = {}
    for name in catalogue():
        map_ = from_catalogue(name)
        if {*map_.sides} == {_MEMORY, _FILES}:
            for rule in map_.rules:
                found.update(dict.fromkeys(_ending(rule, map_.side(_MEMORY))))
    return tuple(found)


def _ending(rule: Rule, side: int) -> Iterator[_Ending]:
    """Yield how names of `rule` end, if files have a tensor under another name, or one for each of a stack."""
    if len(rule.sides[side]) != 1:
        return
    (memory,), files = rule.sides[side], rule.sides[1 - side]
    begin, layer = memory.name.literals[0], memory.name.indices
    if len(layer) != 1 or any((each.name.literals[0], *each.name.indices[:1]) != (begin, *layer) for each in files):
        return
    names = tuple(Name(each.name.literals[1:], each.name.indices[1:], each.name.shifts[1:]) for each in files)
    stack = "".join(dict.fromkeys(name.indices for name in names).popitem()[0])
    if stack:
        dims = [each.dims or () for each in files]
        rows = " + ".join(written(each[:1]) for each in dims)
        wanted = f"{stack} {f'({rows})' if len(dims) > 1 else rows} {written(dims[0][1:])}"
        if memory.dims is None or written(memory.dims) != wanted:
            return
    elif len(files) != 1 or memory.dims is not None:
        return
    yield _Ending(memory.name.literals[1], InFiles(names, stack))


def in_files(name: str) -> Iterator[InFiles]:
    """Yield what files may call the tensor of this name in memory."""
    for ending, (names, stack) in _endings():
        if name.endswith(ending):
            begin = name[: -len(ending)]
            here = (each._replace(literals=(begin + each.literals[0], *each.literals[1:])) for each in names)
            yield InFiles(tuple(here), stack)


def stacks_of(module: str) -> tuple[str, ...]:
    """Return what the stacks are called that the module of this name in memory may hold."""
    endings = (ending.rpartition(".") for ending, (_, stack) in _endings() if stack)
    return tuple(dict.fromkeys(parameter for before, _, parameter in endings if module.endswith(before)))
