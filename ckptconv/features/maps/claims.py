"""Finds the rule of a map for each name. Pure.

A name belongs to the most special rule that has it, or a glob keeps or drops it. Names are compared with all templates
of a side at once; each takes a bounded number of steps.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import NamedTuple, TypeAlias

from ckptconv.errors import LimitError, UsageError
from ckptconv.features.maps.file import KEEPING, Map, catalogue, matches
from ckptconv.features.maps.notation import PLAIN, Name, Rule, Shift
from ckptconv.text import count_of, quoted, some

# The most ways to read one part of a name after the same parts before it.
MAX_PATTERNS = 8
# The most parts of a name in which an index may stand for several.
MAX_PARTS = 64
# The most tensors of rules that may have one name, and the most steps to find the rules of all names: a fixed number,
# and more for each name. In a real map, two tensors have one name, and a name takes ten steps.
MAX_CLAIMS, _STEPS, _STEPS_PER_NAME = 64, 200_000, 200
# The pattern for an index in a part of a name.
_ANY = "(.+?)"
# Names that differ only in numbers between dots, such as those of layers and experts, lead to the same ends. The ends
# of so many names are cached.
_NUMBERS = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_REMEMBERED = 1 << 12
# The most name templates that a name is compared with for a hint, and the most characters of it.
_COMPARED, _LONGEST = 500, 200
# The most globs in a hint.
_SHOWN = 5
# An index of a stack, as names write it.
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
# Wildcards of globs.
_WILD = re.compile(r"\*|\?|\[!?\]?[^]]*\]|\{\w+\}")
# An index of a template.
_INDEX = re.compile(r"\{[^{}]+\}")
# Advice for a glob that keeps all names.
_KEEPING_OTHERS = ' To keep all other names, write a rule instead of the glob: {} = "{{name}}" and {} = "{{name}}".'
# Stands for any value of an index or a wildcard.
_HOLE = "\0"


class UnknownNamesError(UsageError):
    """A map does not have names of a checkpoint: it may be the wrong one."""


# A rule, and the values of its free indices.
Use: TypeAlias = "tuple[int, tuple[str, ...]]"


# A rule, a tensor on its side, and the values of its indices: a text, or the number of a part of the name.
_End: TypeAlias = "tuple[int, int, tuple[str | int, ...]]"


class Claim(NamedTuple):
    """A name of a rule: the number of the rule in the map, the number of the tensor on its side, and the indices."""

    rule: int
    tensor: int
    values: Mapping[str, str]
    use: Use


@dataclass
class Claims:
    """The rule of each name, and the glob of each name that is kept or dropped."""

    found: dict[str, Claim]
    kept: dict[str, str]
    dropped: dict[str, str]


# ---------------------------------------------------------------------------------------------------------- templates


class _Branch:
    """The possible continuations after some parts of a name."""

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
            raise UsageError(
                f"The map has more than {MAX_PATTERNS} patterns for the same part of a name, such as {quoted(part)}."
            )
        return self.patterns.setdefault(pattern, (re.compile(pattern, re.DOTALL), _Branch()))[1]


class Templates:
    """The name templates of one side, arranged by the parts of names between dots.

    An index stands for one part of a name. With `wide`, one index of the template stands for several parts, of which
    the first is no number: so {l} is not a layer together with names below it.
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
        """Return whether any rule claims `name`."""
        return any(True for _ in self._claims(name, wide))

    def claims(self, names: Iterable[str], listed: Collection[str]) -> dict[str, list[Claim]]:
        """Return the claims to each of `names`: those of the most special templates.

        If no rule has a name, and it is not `listed` elsewhere, an index may stand for several parts: in rules with one
        index, in rules that begin with one on a side, and in rules that have no other of `names`: if {p} is a weight in
        one place, it is a weight everywhere.
        """
        claims_of = {name: list(self._claims(name)) for name in names}
        used = {claim.rule for claims in claims_of.values() for claim in claims}
        for name, claims in claims_of.items():
            wide = not claims and name not in listed
            if wide:
                claims += (claim for claim in self._claims(name, wide=True) if self._is_wide(claim, used))
            if len(claims) > 1:
                claims_of[name] = self._most_special(claims, wide)
        return claims_of

    def name(self, rule: int, tensor: int) -> Name:
        """Return the template of a rule's tensor."""
        return self._rules[rule].sides[self._side][tensor].name

    def _most_special(self, claims: Sequence[Claim], wide: bool) -> list[Claim]:
        """Return the `claims` with the most special templates: no other template has only some of their names."""
        names = [self.name(claim.rule, claim.tensor) for claim in claims]
        return [
            claim
            for name, claim in sorted(zip(names, claims, strict=True), key=lambda pair: pair[1].use[0])
            if not any(is_before(rival, name, wide) for rival in names)
        ]

    def _limit(self) -> LimitError:
        return LimitError(
            f"The map {self._map.name} takes too long to match: its templates for {self._map.sides[self._side]} are "
            "too ambiguous.",
            "Use fewer indices and more literal text in its names.",
        )

    def _is_wide(self, claim: Claim, used: Collection[int]) -> bool:
        """Return whether an index of a rule may stand for several parts."""
        rule = self._rules[claim.rule]
        names = [tensor.name for side in rule.sides for tensor in side]
        return claim.rule not in used or len(rule.free) == 1 or not all(name.literals[0] for name in names)

    def more_general(self, rule: Rule, name: Name) -> Iterator[Rule]:
        """Yield the other rules that have all names that `name`, of `rule`, has."""
        example = name._replace(shifts=(PLAIN,) * len(name.indices)).of(
            {index: "0" if index in rule.counted else "x" for index in name.indices}
        )
        for wide in (False, True):
            for claim in self._claims(example, wide):
                general = self._rules[claim.rule]
                if general.number != rule.number and is_before(name, self.name(claim.rule, claim.tensor), wide):
                    yield general

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
            indices: dict[str, str] = {}
            for index_name, shift, text in zip(template.indices, template.shifts, values, strict=True):
                word = parts[text] if isinstance(text, int) else text
                value = _unshifted(shift, word) if index_name in rule.counted else word
                if value is None or indices.setdefault(index_name, value) != value:
                    break
            else:
                yield Claim(number, index, indices, (number, tuple([indices[index_name] for index_name in rule.free])))

    def _ends_of(self, name: str, parts: Sequence[str]) -> list[_End]:
        """Return the ends to which `name` leads, up to one more than the most claims."""
        alike = name if self._tells_numbers else _NUMBERS.sub("0", name)
        ends = self._ends.get(alike)
        if ends is None:
            ends = list(itertools.islice(self.find(parts, False), MAX_CLAIMS + 1))
            if len(self._ends) < _REMEMBERED:
                self._ends[alike] = ends
        return ends

    def find(self, parts: Sequence[str], wide: bool) -> Iterator[_End]:
        """Yield the ends to which `parts` lead, with the values of indices; with `wide`, exactly one index has several
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
                    matched = (at,) if pattern.pattern == _ANY else match.groups()
                    left.append((after, at + 1, (*values, *matched), wide))
                if match and wide and pattern.pattern == _ANY and not part.isdecimal():
                    ends = range(at + 2, len(parts) + 1)
                    left.extend((after, end, (*values, ".".join(parts[at:end])), False) for end in ends)


def _unshifted(shift: Shift, value: str) -> str | None:
    """Return the value of an index that is a number; None for a number that the name has for no index."""
    index = shift.index_of(int(value)) if _NUMBER.fullmatch(value) else None
    return None if index is None else str(index)


# ---------------------------------------------------------------------------------------------------------- precedence


def is_before(special: Name, general: Name, wide: bool = False) -> bool:
    """Return whether a template matches only some of the names of `general`, and so has precedence.

    With `wide`, an index stands for several parts between dots, else for one.
    """
    return _covers(general, special, wide) and not _covers(special, general, wide)


@functools.lru_cache(1 << 12)
def _covers(general: Name, special: Name, wide: bool) -> bool:
    """Return whether `general` matches all names that `special` matches."""
    names = [_HOLE.join(special.literals)], [_HOLE.join(general.literals)]
    if not wide:
        names = names[0][0].split("."), names[1][0].split(".")
    return len(names[0]) == len(names[1]) and all(
        _has(template.split(_HOLE), part) for part, template in zip(*names, strict=True)
    )


def _has(literals: Sequence[str], text: str) -> bool:
    """Return whether `text` consists of these literals, with some characters between each two."""
    first, *others = literals
    if not others:
        return text == first
    at = len(first)
    for literal in others[:-1]:
        index = text.find(literal, at + 1)
        if index < 0:
            return False
        at = index + len(literal)
    return text.startswith(first) and text.endswith(others[-1]) and len(text) - len(others[-1]) > at


def precedences(map_: Map) -> list[tuple[Rule, Rule]]:
    """Return the pairs of rules that share a name, the rule with precedence first."""
    pairs: dict[tuple[int, int], tuple[Rule, Rule]] = {}
    for side in (0, 1):
        templates = Templates(map_, side)
        for rule in map_.rules:
            for tensor in rule.sides[side] if rule.read[side] else ():
                for general in templates.more_general(rule, tensor.name):
                    pairs.setdefault((rule.number, general.number), (rule, general))
    return [pairs[key] for key in sorted(pairs)]


# -------------------------------------------------------------------------------------------------- owners of names


def source_side(map_: Map, names: Iterable[str]) -> int:
    """Return the number of the side of `names`: the one that has more of them.

    Raise UsageError if neither has any, or both have as many.
    """
    names = list(names)
    templates = [Templates(map_, side) for side in (0, 1)]
    counts = [sum(map(known.has, names)) for known in templates]
    if counts[0] == counts[1]:
        counts = [sum(known.has(name) or known.has(name, wide=True) for name in names) for known in templates]
    if not any(counts):
        if not names:
            raise UsageError(f"The checkpoint has no tensors for the map {map_.name}.")
        close = _nearest(map_, (0, 1), names[0])
        raise UnknownNamesError(
            f"The map {map_.name} matches none of {count_of(len(names), 'name')}, neither on its side "
            f"{map_.sides[0]!r} nor on its side {map_.sides[1]!r}. The first name is {quoted(names[0])}"
            + (f"; the closest name in the map is {close}." if close else ".")
        )
    if counts[0] == counts[1]:
        raise UsageError(
            f"The map {map_.name} matches {counts[0]} of {count_of(len(names), 'name')} on its side {map_.sides[0]!r}, "
            f"and the same number on its side {map_.sides[1]!r}.",
            f"Specify the side of the output: --map {map_.name}:{map_.sides[1]} or --map {map_.name}:{map_.sides[0]}.",
        )
    return 0 if counts[0] > counts[1] else 1


def _nearest(map_: Map, sides: Sequence[int], name: str) -> str:
    """Return the name of a map that is most similar to `name`, quoted; "" if none is similar."""
    import difflib

    texts = [str(tensor.name) for rule in map_.rules for number in sides for tensor in rule.sides[number]]
    close = difflib.get_close_matches(name[:_LONGEST], texts[:_COMPARED], n=1, cutoff=0.3)
    return quoted(close[0]) if close else ""


def lacking(map_: Map, side: int, claims: Claims) -> tuple[str, ...]:
    """Return the names of the required rules that the checkpoint lacks; for a rule with alternatives, the first."""

    def outcome(rule: Rule) -> tuple[int | str, ...]:
        return rule.number, *(str(tensor.name) for tensor in rule.sides[1 - side])

    used = {outcome(map_.rules[claim.rule]) for claim in claims.found.values()}
    unused: dict[tuple[int | str, ...], Rule] = {}
    for rule in map_.rules:
        if rule.required and rule.read[side] and outcome(rule) not in used:
            unused.setdefault(outcome(rule), rule)
    return tuple(str(tensor.name) for rule in unused.values() for tensor in rule.sides[side])


def claimed(map_: Map, side: int, names: Iterable[str], *, strict: bool = True) -> Claims:
    """Return the rule or glob of each of `names`, which belong to a side.

    Raise UsageError for a name with two rules, neither of them more special, and, if `strict`, for one without any.
    """
    templates = Templates(map_, side)
    claims = Claims({}, {}, {})
    unclaimed = []
    names = list(names)
    lists = ("keep", map_.keep[side]), ("drop", map_.drop[side])
    listed = {name: [(glob, key) for key, globs in lists if (glob := matches(name, globs))] for name in names}
    all_claims = templates.claims(names, {name for name, globs in listed.items() if globs})
    complete = _complete(map_, side, all_claims.values())
    for name, fitting in all_claims.items():
        globs = listed[name]
        # A glob has precedence over a rule that has all names of the glob.
        fitting = [claim for claim in fitting if not any(_has_all(templates, claim, glob) for glob, _ in globs)]
        if len(fitting) > 1:
            fitting = [claim for claim in fitting if claim.use in complete] or fitting
            # Layers from a number on belong to the rule that adds it.
            fitting = [claim for claim in fitting if map_.rules[claim.rule].adds(side)] or fitting
        owners = [map_.rules[claim.rule].where for claim in fitting]
        owners += [f"[{key}] {glob!r}" for glob, key in globs]
        if len(owners) > 1:
            raise UsageError(
                f"Several entries of the map {map_.name} match the name {quoted(name)}: {' and '.join(owners)}.",
                "A rule takes precedence over another only if the other matches all of its names too."
                + (_KEEPING_OTHERS.format(*map_.sides) if ("*", "keep") in globs else ""),
            )
        if fitting:
            claims.found[name] = fitting[0]
        elif globs:
            ((glob, key),) = globs
            (claims.kept if key == "keep" else claims.dropped)[name] = glob
        else:
            unclaimed.append(name)
    if unclaimed and strict:
        close = _nearest(map_, (side,), unclaimed[0])
        keepable = _globs_of(unclaimed, [*claims.found, *claims.kept, *claims.dropped])
        keeping = f" {KEEPING.format(map_.sides[side], keepable)}" if keepable else ""
        raise UnknownNamesError(
            f"The map {map_.name} has no rule for {count_of(len(unclaimed), 'tensor')} on its side "
            f"{map_.sides[side]!r}: {some(unclaimed)}."
            + (f" In the map, the name closest to the first of these is {close}." if close else ""),
            f"If it is, add a rule for each tensor{_to_edit(map_)}, or exclude these tensors with --exclude."
            f"{keeping} To rename only some tensors, use --rename 'REGEX=REPL' instead of the map.",
        )
    return claims


def _to_edit(map_: Map) -> str:
    """Return how to get a file of the map that can be changed, after words about its change; "" if it is from one."""
    if map_.name not in catalogue():
        return ""
    return f" to a copy of the map (ckptconv maps show {map_.name} > my.toml; then --map ./my.toml)"


def _globs_of(names: Iterable[str], others: Collection[str]) -> str:
    """Return globs of these names, not of `others`, for a list in a map; "" if there are none. Names that differ only
    in numbers share one glob."""
    globs: dict[str, str] = {}
    for name in names:
        globs.setdefault(_NUMBERS.sub("{i}", escape(name)), escape(name))
    shown = []
    for alike, own in itertools.islice(globs.items(), _SHOWN):
        fit = next((text for text in (alike, own) if not any(matches(other, [text]) for other in others)), "")
        if not fit or not fit.isprintable() or "'" in fit:
            return ""
        shown.append(f"'{fit}'")
    return ", ".join([*shown, *(["..."] if len(globs) > len(shown) else [])])


def _has_all(templates: Templates, claim: Claim, glob: str) -> bool:
    """Return whether the template of a claim matches all names of a glob, not counting endings after a dot."""
    return _has(templates.name(claim.rule, claim.tensor).literals, _WILD.sub(_HOLE, glob))


def _complete(map_: Map, side: int, claims: Iterable[Sequence[Claim]]) -> set[Use]:
    """Return the uses of rules whose tensors all exist. A name that several rules have belongs to such a use."""
    tensors_of: dict[Use, set[int]] = collections.defaultdict(set)
    for name_claims in claims:
        for claim in name_claims:
            tensors_of[claim.use].add(claim.tensor)
    return {use for use, tensors in tensors_of.items() if len(tensors) == len(map_.rules[use[0]].sides[side])}


def check_way_back(map_: Map, side: int, made_names: Mapping[str, tuple[Rule | None, Mapping[str, str | int]]]) -> None:
    """Raise UsageError if the reverse map would read some of the names that were made, which are of `side`, in another
    way.

    `made_names` has for each name the rule that made it and the values of indices; a kept name has no rule.
    """
    try:
        claims = claimed(map_, side, made_names, strict=False)
    except UsageError as error:
        raise UsageError(f"The reverse map is ambiguous. {error.message}", error.hint) from None
    for name, (rule, values) in made_names.items():
        claim = claims.found.get(name)
        back = map_.rules[claim.rule] if claim else None
        if back is not None and any(shift.is_open for shift in back.shifts.values()):
            continue  # the reverse map raises an error for the size that names add
        if rule is None and claim is None:
            continue
        read_back = claim.values if claim else {}
        same = all(str(value) == read_back.get(index, str(value)) for index, value in values.items())
        # Another alternative may count other things: {6 l} and {l}.
        if back and rule and back.number == rule.number and (same or back.shifts != rule.shifts):
            continue
        by = f"{rule.where} makes" if rule else "[keep] keeps"
        glob = claims.kept.get(name) or claims.dropped.get(name)
        owner = back.where if back else f"{glob!r} of [keep] or [drop]" if glob else "no rule"
        others = "" if same else ", with other indices"
        raise UsageError(
            f"The map {map_.name} cannot be reversed: {by} {quoted(name)}, but in reverse, from {map_.sides[side]}, "
            f"{owner} matches that name{others}.",
            "Change the name in one of the rules so that it is unique.",
        )
