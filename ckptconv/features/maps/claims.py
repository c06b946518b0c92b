"""Finds out which rule of a map each name belongs to. Pure.

A name belongs to the most special rule that has it, or is kept or dropped by a glob. Names are compared with all
templates of a side at once, and that takes a bounded number of steps for each.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ckptconv.errors import LimitError, UsageError
from ckptconv.features.maps.file import Map, matches
from ckptconv.features.maps.notation import Name, Rule
from ckptconv.text import quoted, some

# Ways in which one part of a name may be read after the same parts before it.
MAX_PATTERNS = 8
# Parts of a name of which an index may stand for several.
MAX_PARTS = 64
# Tensors of rules that may have one name, and steps that finding them for all names may take: some, and more for each
# name. A real map has two, and takes ten steps.
MAX_CLAIMS, _STEPS, _STEPS_PER_NAME = 64, 200_000, 200
# What an index in a part of a name stands for.
_ANY = "(.+?)"
# Names that differ in numbers between dots alone, as those of layers and experts, lead to the same ends. Those of so
# many names are remembered.
_NUMBERS = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_REMEMBERED = 1 << 12
# Name templates that a name is compared with for a hint, and characters of it.
_COMPARED, _LONGEST = 500, 200
# An index of a stack, as names have it.
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
# What globs have in place of characters.
_WILD = re.compile(r"\*|\?|\[!?\]?[^]]*\]|\{\w+\}")
# An index of a template.
_INDEX = re.compile(r"\{[^{}]+\}")
# Stands for whatever an index or a wildcard has in place of it.
_HOLE = "\0"

# A rule, and the values of its free indices.
Use: TypeAlias = "tuple[int, tuple[str, ...]]"


# A rule, a tensor on its side, and what its indices stand for: a text, or the part of the name with this number.
_End: TypeAlias = "tuple[int, int, tuple[str | int, ...]]"


class Claim(NamedTuple):
    """A name that a rule has: the number of the rule in the map, that of the tensor on its side, and the indices."""

    rule: int
    tensor: int
    values: Mapping[str, str]
    use: Use


@dataclass
class Claims:
    """Which rule each name belongs to, and which are kept or dropped by which glob."""

    found: dict[str, Claim]
    kept: dict[str, str]
    dropped: dict[str, str]


# ---------------------------------------------------------------------------------------------------------- templates


class _Branch:
    """What may follow after some parts of a name."""

    def __init__(self) -> None:
        self.literals: dict[str, _Branch] = {}
        self.patterns: dict[str, tuple[re.Pattern[str], _Branch]] = {}
        self.ends: list[tuple[int, int]] = []

    def add(self, part: str) -> _Branch:
        pieces = _INDEX.split(part)
        if len(pieces) == 1:
            return self.literals.setdefault(part, _Branch())
        pattern = _ANY.join(map(re.escape, pieces))
        if pattern not in self.patterns and len(self.patterns) == MAX_PATTERNS:
            raise UsageError(f"The names of a map write {quoted(part)} in more than {MAX_PATTERNS} ways at one place.")
        return self.patterns.setdefault(pattern, (re.compile(pattern, re.DOTALL), _Branch()))[1]


class Templates:
    """The name templates of one side, arranged by the parts of names between dots.

    An index stands for one part of a name, or with `wide` one of the template's for several, of which the first is no
    number: so {l} is no layer and what is below it.
    """

    def __init__(self, map_: Map, side: int) -> None:
        self._map, self._rules, self._side = map_, map_.rules, side
        self._root = _Branch()
        self._steps = _STEPS
        self._ends: dict[str, list[_End]] = {}
        self._tells_numbers = False
        for number, rule in enumerate(map_.rules):
            for index, tensor in enumerate(rule.sides[side] if rule.read[side] else ()):
                branch = self._root
                for part in str(tensor.name).split("."):
                    branch = branch.add(part)
                    self._tells_numbers |= _INDEX.sub("", part).isdecimal()
                branch.ends.append((number, index))

    def has(self, name: str, wide: bool = False) -> bool:
        """Whether there is a claim to `name`."""
        return any(True for _ in self._claims(name, wide))

    def claims(self, names: Iterable[str], listed: Collection[str]) -> dict[str, list[Claim]]:
        """Return the claims to each of `names`: those of the most special templates.

        Where no rule has a name, and it is not `listed` otherwise, an index may stand for several parts: in rules of
        one index, in those that begin with one on a side, and in those that have no other of `names`, as {p} that is a
        weight somewhere is one everywhere.
        """
        found = {name: list(self._claims(name)) for name in names}
        used = {claim.rule for claims in found.values() for claim in claims}
        for name, claims in found.items():
            wide = not claims and name not in listed
            if wide:
                claims += (each for each in self._claims(name, wide=True) if self._is_wide(each, used))
            if len(claims) > 1:
                found[name] = self._most_special(claims, wide)
        return found

    def name(self, rule: int, tensor: int) -> Name:
        """Return the template of a rule's tensor."""
        return self._rules[rule].sides[self._side][tensor].name

    def _most_special(self, claims: Sequence[Claim], wide: bool) -> list[Claim]:
        """Return those of `claims` whose templates have no name that another of the templates has not, or are equal."""
        names = [self.name(claim.rule, claim.tensor) for claim in claims]
        return [
            claim
            for name, claim in sorted(zip(names, claims, strict=True), key=lambda each: each[1].use[0])
            if not any(is_before(other, name, wide) for other in names)
        ]

    def _limit(self) -> LimitError:
        return LimitError(
            f"The map {self._map.name} takes too long: names can be read in too many ways, as "
            f"{self._map.sides[self._side]}.",
            "Write fewer indices, and more literal parts of the names.",
        )

    def _is_wide(self, claim: Claim, used: Collection[int]) -> bool:
        """Whether indices of a rule may stand for several parts."""
        rule = self._rules[claim.rule]
        names = [tensor.name for side in rule.sides for tensor in side]
        return claim.rule not in used or len(rule.free) == 1 or not all(name.literals[0] for name in names)

    def more_general(self, rule: Rule, name: Name) -> Iterator[Rule]:
        """Yield the other rules that have all names that `name`, of `rule`, has."""
        example = name._replace(shifts=("",) * len(name.indices)).of(
            {index: "0" if index in rule.counted else "x" for index in name.indices}
        )
        for wide in (False, True):
            for claim in self._claims(example, wide):
                other = self._rules[claim.rule]
                if other.number != rule.number and is_before(name, self.name(claim.rule, claim.tensor), wide):
                    yield other

    def _claims(self, name: str, wide: bool = False) -> Iterator[Claim]:
        parts = name.split(".")
        self._steps += _STEPS_PER_NAME
        if not wide:
            ends: Iterable[_End] = self._ends_of(name, parts)
        else:
            ends = self.find(parts, wide) if len(parts) <= MAX_PARTS else ()
        for count, (number, index, values) in enumerate(ends):
            if count == MAX_CLAIMS:
                raise self._limit()
            rule, template = self._rules[number], self.name(number, index)
            told: dict[str, str] = {}
            for each, by, text in zip(template.indices, template.shifts, values, strict=True):
                word = parts[text] if isinstance(text, int) else text
                value = _unshifted(by, word) if each in rule.counted else word
                if value is None or told.setdefault(each, value) != value:
                    break
            else:
                yield Claim(number, index, told, (number, tuple([told[each] for each in rule.free])))

    def _ends_of(self, name: str, parts: Sequence[str]) -> list[_End]:
        """Return the ends that `name` leads to, up to one more than it may have claims."""
        alike = name if self._tells_numbers else _NUMBERS.sub("0", name)
        ends = self._ends.get(alike)
        if ends is None:
            ends = list(itertools.islice(self.find(parts, False), MAX_CLAIMS + 1))
            if len(self._ends) < _REMEMBERED:
                self._ends[alike] = ends
        return ends

    def find(self, parts: Sequence[str], wide: bool) -> Iterator[_End]:
        """Yield the ends that `parts` lead to, with the values of indices; with `wide`, exactly one index has several
        parts. Raise LimitError if that takes too many steps."""
        left: list[tuple[_Branch, int, tuple[str | int, ...], bool]] = [(self._root, 0, (), wide)]
        while left:
            self._steps -= 1
            if self._steps < 0:
                raise self._limit()
            branch, at, values, wide = left.pop()
            if at == len(parts):
                for number, index in branch.ends if not wide else ():
                    yield number, index, values
                continue
            part = parts[at]
            if part in branch.literals:
                left.append((branch.literals[part], at + 1, values, wide))
            for pattern, after in branch.patterns.values():
                match = pattern.fullmatch(part)
                if match:
                    found = (at,) if pattern.pattern == _ANY else match.groups()
                    left.append((after, at + 1, (*values, *found), wide))
                if match and wide and pattern.pattern == _ANY and not part.isdecimal():
                    ends = range(at + 2, len(parts) + 1)
                    left.extend((after, end, (*values, ".".join(parts[at:end])), False) for end in ends)


def _unshifted(by: str, value: str) -> str | None:
    """Return the value of an index that is a number, to which a name adds `by`; None for one that it cannot have. A
    size that is added and not known yet counts as 0."""
    if not _NUMBER.fullmatch(value):
        return None
    number = int(value) - (int(by) if by.isdecimal() else 0)
    return str(number) if number >= 0 else None


# ---------------------------------------------------------------------------------------------------------- precedence


def is_before(special: Name, general: Name, wide: bool = False) -> bool:
    """Whether a template has some of the names that `general` has, and no other: it goes before that.

    With `wide`, an index stands for several parts between dots, else for one.
    """
    return _covers(general, special, wide) and not _covers(special, general, wide)


@functools.lru_cache(1 << 12)
def _covers(general: Name, special: Name, wide: bool) -> bool:
    """Whether `general` has all names that `special` has."""
    names = [_HOLE.join(special.literals)], [_HOLE.join(general.literals)]
    if not wide:
        names = names[0][0].split("."), names[1][0].split(".")
    return len(names[0]) == len(names[1]) and all(
        _has(template.split(_HOLE), part) for part, template in zip(*names, strict=True)
    )


def _has(literals: Sequence[str], text: str) -> bool:
    """Whether `text` is these literals with some characters between each two."""
    first, *others = literals
    if not others:
        return text == first
    at = len(first)
    for literal in others[:-1]:
        found = text.find(literal, at + 1)
        if found < 0:
            return False
        at = found + len(literal)
    return text.startswith(first) and text.endswith(others[-1]) and len(text) - len(others[-1]) > at


def precedences(map_: Map) -> list[tuple[Rule, Rule]]:
    """Return the pairs of rules of which the first goes before the second, where both have a name."""
    found: dict[tuple[int, int], tuple[Rule, Rule]] = {}
    for side in (0, 1):
        templates = Templates(map_, side)
        for rule in map_.rules:
            for tensor in rule.sides[side] if rule.read[side] else ():
                for general in templates.more_general(rule, tensor.name):
                    found.setdefault((rule.number, general.number), (rule, general))
    return [found[key] for key in sorted(found)]


# ---------------------------------------------------------------------------------------------------- whose is a name


def source_side(map_: Map, names: Iterable[str]) -> int:
    """Return the number of the side that `names` are of: the one that has more of them.

    Raise UsageError if neither has any, or both have as many.
    """
    names = list(names)
    templates = [Templates(map_, side) for side in (0, 1)]
    counts = [sum(map(each.has, names)) for each in templates]
    if counts[0] == counts[1]:
        counts = [sum(each.has(name) or each.has(name, wide=True) for name in names) for each in templates]
    if not any(counts):
        raise UsageError(
            f"The map {map_.name} has none of the {len(names)} names, as {map_.sides[0]} or as {map_.sides[1]}. "
            f"{_nearest(map_, None, names)}"
        )
    if counts[0] == counts[1]:
        raise UsageError(
            f"The map {map_.name} has {counts[0]} of the {len(names)} names both as {map_.sides[0]} and as "
            f"{map_.sides[1]}.",
            f"Give the direction: --map {map_.name}:{map_.sides[1]} or --map {map_.name}:{map_.sides[0]}.",
        )
    return 0 if counts[0] > counts[1] else 1


def _nearest(map_: Map, side: int | None, names: Sequence[str]) -> str:
    """Say which name of a map is most like the first of `names`."""
    sides = (0, 1) if side is None else (side,)
    texts = [str(tensor.name) for rule in map_.rules for each in sides for tensor in rule.sides[each]]
    if not names:
        return "The checkpoint has no names."
    import difflib

    close = difflib.get_close_matches(names[0][:_LONGEST], texts[:_COMPARED], n=1, cutoff=0.3)
    return f"The first is {quoted(names[0])}" + (f"; the map has {quoted(close[0])}." if close else ".")


def claimed(map_: Map, side: int, names: Iterable[str], *, strict: bool = True) -> Claims:
    """Return which rule, or which glob, has each of `names`, which are of a side.

    Raise UsageError for a name that two have of which neither is more special, and if `strict` for one that none has.
    """
    templates = Templates(map_, side)
    claims = Claims({}, {}, {})
    unclaimed = []
    names = list(names)
    lists = ("keep", map_.keep[side]), ("drop", map_.drop[side])
    listed = {name: [(glob, key) for key, globs in lists if (glob := matches(name, globs))] for name in names}
    all_claims = templates.claims(names, {name for name, globs in listed.items() if globs})
    complete = _complete(map_, side, all_claims.values())
    for name, found in all_claims.items():
        globs = listed[name]
        # A glob goes before a rule that would have every name like it.
        found = [each for each in found if not any(_has_all(templates, each, glob) for glob, _ in globs)]
        if len(found) > 1:
            found = [claim for claim in found if claim.use in complete] or found
            # Layers from a number on are those of the rule that says so.
            found = [claim for claim in found if map_.rules[claim.rule].adds(side)] or found
        owners = [map_.rules[claim.rule].where for claim in found]
        owners += [f"[{key}] {glob!r}" for glob, key in globs]
        if len(owners) > 1:
            raise UsageError(
                f"The map {map_.name}: two have the name {quoted(name)}: {' and '.join(owners)}.",
                "If two rules match a name, the more specific rule wins: the one whose names all match the other rule "
                "too.",
            )
        if found:
            claims.found[name] = found[0]
        elif globs:
            ((glob, key),) = globs
            (claims.kept if key == "keep" else claims.dropped)[name] = glob
        else:
            unclaimed.append(name)
    if unclaimed and strict:
        raise UsageError(
            f"The map {map_.name} has no rule for {len(unclaimed)} of the tensors, as {map_.sides[side]}: "
            f"{some(unclaimed)}. {_nearest(map_, side, unclaimed)}",
            "Add a rule for each tensor, list it under [keep] or [drop], or leave it out with --exclude.",
        )
    return claims


def _has_all(templates: Templates, claim: Claim, glob: str) -> bool:
    """Whether the template of a claim has all names that a glob has, endings after a dot apart."""
    return _has(templates.name(claim.rule, claim.tensor).literals, _WILD.sub(_HOLE, glob))


def _complete(map_: Map, side: int, claims: Iterable[Sequence[Claim]]) -> set[Use]:
    """Return the uses of rules of which every tensor is there. A name that several rules have belongs to such a one."""
    there: dict[Use, set[int]] = collections.defaultdict(set)
    for found in claims:
        for claim in found:
            there[claim.use].add(claim.tensor)
    return {use for use, tensors in there.items() if len(tensors) == len(map_.rules[use[0]].sides[side])}


def check_way_back(map_: Map, side: int, made: Mapping[str, tuple[Rule | None, Mapping[str, str | int]]]) -> None:
    """Raise UsageError if names that were made, which are of `side`, would be read otherwise on the way back.

    `made` has for each the rule that made it and the values of indices, and no rule for a name that was kept.
    """
    try:
        claims = claimed(map_, side, made, strict=False)
    except UsageError as error:
        raise UsageError(f"The reverse map is ambiguous. {error.message}", error.hint) from None
    for name, (rule, values) in made.items():
        claim = claims.found.get(name)
        back = map_.rules[claim.rule] if claim else None
        if back is not None and any(not by.isdecimal() for by in back.shifts.values()):
            continue  # on the way back, an error asks for the size that names add
        if rule is None and claim is None:
            continue
        told = claim.values if claim else {}
        same = all(str(value) == told.get(index, str(value)) for index, value in values.items())
        if back and rule and back.number == rule.number and same:
            continue
        by = f"{rule.where} makes" if rule else "[keep] keeps"
        glob = claims.kept.get(name) or claims.dropped.get(name)
        owner = back.where if back else f"{glob!r} of [keep] or [drop]" if glob else "no rule"
        others = "" if same else ", with other indices"
        raise UsageError(
            f"The map {map_.name} cannot be reversed: {by} {quoted(name)}, and from {map_.sides[side]}, {owner} has "
            f"that name{others}.",
            "Change the name in one of the rules so that it is unique.",
        )
