"""The names in files of tensors that have other names in memory in transformers, by the table in memory.txt.

transformers 5 has new names in memory for many models, whose files keep the old names, and all experts of a layer in
one tensor. PEFT uses the names in memory. `scripts/memory_names.py` makes the table from transformers' own conversion
mapping: families of models, each with rules for the beginnings, or the ends, of names in both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

# In names of the table: any number, the number of an expert, and the beginning of a name.
_NUMBER, _EXPERT, _BEGIN = "*", "+", "^"
# Precedes the index of a number of a name, where names are equal except for their numbers.
_WHICH = "\0"
# The most kinds of names whose results are cached.
_MOST_KNOWN = 1 << 12


class InFiles(NamedTuple):
    """The names in files of the parts of one tensor in memory: their rows follow one another. If the tensor is
    `stacked`, there is one part of each name for every index of the first dimension (`of_expert`). Or it is number
    `part` of `parts` equal parts of the rows of the only name."""

    names: tuple[str, ...]
    stacked: bool = False
    part: int = 0
    parts: int = 1

    def of_expert(self, number: int) -> tuple[str, ...]:
        """Return the names of one expert."""
        return tuple(name.replace(f".{_EXPERT}.", f".{number}.") for name in self.names)


class _Rule(NamedTuple):
    """A rule from a name in memory, in parts, to the names in `files`; without `files`, these have another layout. If
    it is `whole`, the name ends there."""

    memory: tuple[str, ...]
    begins: bool
    whole: bool
    files: InFiles | None

    def ends(self, name: list[str]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of parts in a name to which the rule applies."""
        length = len(self.memory)
        places = [0] if self.begins else range(len(name) - length + 1)
        for at in [len(name) - length] if self.whole and not self.begins else places:
            if at < 0 or (self.whole and at + length != len(name)):
                continue
            section = name[at : at + length]
            if len(section) == length and all(
                mine == step or (mine == _NUMBER and (step.isdecimal() or step.startswith(_WHICH)))
                for mine, step in zip(self.memory, section, strict=True)
            ):
                yield at, at + length


class Family:
    """The rules of models with the same names. `called` are the types of these models."""

    def __init__(self, called: tuple[str, ...], rules: list[_Rule]) -> None:
        self.called = called
        # The longest rule first: it is the most specific.
        self._rules = sorted(rules, key=lambda rule: -len(rule.memory))
        self._known: dict[str, list[InFiles]] = {}

    def in_files(self, name: str) -> Iterator[InFiles]:
        """Yield the names in files of the tensor with this name in memory, the most likely first."""
        parts = name.split(".")
        numbers = [part for part in parts if part.isdecimal()]
        left = itertools.count()
        kind = ".".join(f"{_WHICH}{next(left)}" if part.isdecimal() else part for part in parts)
        if _WHICH in name:
            return
        if kind not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[kind] = [*self._of_kind(kind.split("."))]
        for files in self._known[kind]:
            filled = (
                ".".join(numbers[int(part[1:])] if part.startswith(_WHICH) else part for part in file.split("."))
                for file in files.names
            )
            yield files._replace(names=tuple(filled))

    def _of_kind(self, parts: list[str]) -> Iterator[InFiles]:
        """Yield the names in files of a tensor, with the indices of its numbers in the place of the numbers."""
        for rule in self._rules:
            for start, stop in rule.ends(parts) if rule.files else ():
                assert rule.files is not None
                numbers = [mine for mine, step in zip(parts[start:stop], rule.memory, strict=True) if step == _NUMBER]
                names = (_joined(parts[:start], _filled(file, numbers), parts[stop:]) for file in rule.files.names)
                yield rule.files._replace(names=tuple(names))

    def stacks_of(self, module: str) -> Iterator[str]:
        """Yield the names of the stacks that a module with this name in memory may have."""
        for rule in self._rules:
            if (
                rule.files
                and rule.files.stacked
                and any(True for _ in rule.ends([*module.split("."), rule.memory[-1]]))
            ):
                yield rule.memory[-1]

    def has_other_layout(self, name: str) -> bool:
        """Return whether files store a tensor with this name in memory in another layout."""
        parts = name.split(".")
        return any(any(True for _ in rule.ends(parts)) for rule in self._rules if rule.files is None)


def _filled(file: str, numbers: list[str]) -> list[str]:
    left = iter(numbers)
    return [next(left) if part == _NUMBER else part for part in file.split(".") if part]


def _joined(*parts: list[str]) -> str:
    return ".".join(part for part_list in parts for part in part_list)


@functools.cache
def families() -> tuple[Family, ...]:
    """Return the families of the table."""
    from importlib import resources

    table: list[tuple[tuple[str, ...], list[_Rule]]] = []
    for line in (resources.files("ckptconv.features.merge") / "memory.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            table.append((tuple(line[1:-1].split()), []))
        elif line and not line.startswith("#"):
            table[-1][1].append(_rule(line))
    return tuple(Family(*row) for row in table)


def _rule(line: str) -> _Rule:
    memory, _, text = (side.strip() for side in line.partition(" ="))
    text, _, cut = text.partition(" ") if "/" in text else (text, "", "")
    files = tuple(text.split(" | "))
    in_files = InFiles(files, _EXPERT in files[0].split("."))
    if cut:
        part, _, parts = cut.partition("/")
        in_files = in_files._replace(part=int(part), parts=int(parts))
    is_whole = in_files.stacked or len(files) > 1 or bool(cut) or text == "!"
    name = tuple(memory.removeprefix(_BEGIN).split("."))
    return _Rule(name, memory.startswith(_BEGIN), is_whole, None if text == "!" else in_files)
