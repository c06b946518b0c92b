"""What files call the tensors that transformers holds under other names, by the table in memory.txt.

transformers 5 has new names in memory for many models, whose files keep the old ones, and all experts of a layer in one
tensor. PEFT names what it adapts as the model in memory does. `scripts/memory_names.py` makes the table of
transformers' own conversion mapping: families of models, each with rules of how names begin, or end, in both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

# In names of the table: any number, the number of an expert, and that a name begins there.
_NUMBER, _EXPERT, _BEGIN = "*", "+", "^"
# Stands before which number of a name is meant, where names are alike but for their numbers.
_WHICH = "\0"
# Kinds of names of which is known what they become.
_MOST_KNOWN = 1 << 12


class InFiles(NamedTuple):
    """The names in files of what one tensor in memory consists of: their rows are one after the other. If it is
    `stacked`, there is one of each for every index of the first dimension (`of_expert`). Or it is number `part` of as
    many equal `parts` of the rows of the only one."""

    names: tuple[str, ...]
    stacked: bool = False
    part: int = 0
    parts: int = 1

    def of_expert(self, number: int) -> tuple[str, ...]:
        """Return the names of one expert."""
        return tuple(name.replace(f".{_EXPERT}.", f".{number}.") for name in self.names)


class _Rule(NamedTuple):
    """How a name in memory, in parts, becomes `files`; without them, these have another layout. It ends there if it is
    `whole`."""

    memory: tuple[str, ...]
    begins: bool
    whole: bool
    files: InFiles | None

    def ends(self, name: list[str]) -> Iterator[tuple[int, int]]:
        """Yield where in a name the rule applies: from which part to which."""
        length = len(self.memory)
        places = [0] if self.begins else range(len(name) - length + 1)
        for at in [len(name) - length] if self.whole and not self.begins else places:
            if at < 0 or (self.whole and at + length != len(name)):
                continue
            there = name[at : at + length]
            if len(there) == length and all(
                mine == other or (mine == _NUMBER and (other.isdecimal() or other.startswith(_WHICH)))
                for mine, other in zip(self.memory, there, strict=True)
            ):
                yield at, at + length


class Family:
    """The rules of models with the same names. `called` are the types of these."""

    def __init__(self, called: tuple[str, ...], rules: list[_Rule]) -> None:
        self.called = called
        # The longest first: it says more.
        self._rules = sorted(rules, key=lambda rule: -len(rule.memory))
        self._known: dict[str, list[InFiles]] = {}

    def in_files(self, name: str) -> Iterator[InFiles]:
        """Yield what files may call the tensor of this name in memory, what is most likely first."""
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
        for each in self._known[kind]:
            filled = (
                ".".join(numbers[int(part[1:])] if part.startswith(_WHICH) else part for part in file.split("."))
                for file in each.names
            )
            yield each._replace(names=tuple(filled))

    def _of_kind(self, parts: list[str]) -> Iterator[InFiles]:
        """Yield what files may call a tensor, with which of its numbers in the place of these."""
        for rule in self._rules:
            for start, stop in rule.ends(parts) if rule.files else ():
                assert rule.files is not None
                numbers = [mine for mine, other in zip(parts[start:stop], rule.memory, strict=True) if other == _NUMBER]
                names = (_joined(parts[:start], _filled(file, numbers), parts[stop:]) for file in rule.files.names)
                yield rule.files._replace(names=tuple(names))

    def stacks_of(self, module: str) -> Iterator[str]:
        """Yield what the stacks are called that the module of this name in memory may hold."""
        for rule in self._rules:
            if (
                rule.files
                and rule.files.stacked
                and any(True for _ in rule.ends([*module.split("."), rule.memory[-1]]))
            ):
                yield rule.memory[-1]

    def has_other_layout(self, name: str) -> bool:
        """Whether files hold the tensor of this name in memory in a layout of their own."""
        parts = name.split(".")
        return any(any(True for _ in rule.ends(parts)) for rule in self._rules if rule.files is None)


def _filled(file: str, numbers: list[str]) -> list[str]:
    left = iter(numbers)
    return [next(left) if part == _NUMBER else part for part in file.split(".") if part]


def _joined(*parts: list[str]) -> str:
    return ".".join(part for each in parts for part in each)


@functools.cache
def families() -> tuple[Family, ...]:
    """Return the families of the table."""
    from importlib import resources

    found: list[tuple[tuple[str, ...], list[_Rule]]] = []
    for line in (resources.files("ckptconv.features.merge") / "memory.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            found.append((tuple(line[1:-1].split()), []))
        elif line and not line.startswith("#"):
            found[-1][1].append(_rule(line))
    return tuple(Family(*each) for each in found)


def _rule(line: str) -> _Rule:
    memory, _, text = (each.strip() for each in line.partition(" ="))
    text, _, cut = text.partition(" ") if "/" in text else (text, "", "")
    files = tuple(text.split(" | "))
    made = InFiles(files, _EXPERT in files[0].split("."))
    if cut:
        part, _, parts = cut.partition("/")
        made = made._replace(part=int(part), parts=int(parts))
    is_whole = made.stacked or len(files) > 1 or bool(cut) or text == "!"
    name = tuple(memory.removeprefix(_BEGIN).split("."))
    return _Rule(name, memory.startswith(_BEGIN), is_whole, None if text == "!" else made)
