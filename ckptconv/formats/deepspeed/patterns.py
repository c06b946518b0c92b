"""Matches regular expressions from a file against names, in time linear in the length of a name.

Python's `re` backtracks, which may take forever. This module follows all alternatives of all expressions at once
(Thompson 1968, doi:10.1145/363347.363387), and caches the sets of places that it reaches. It refuses what needs more,
such as backreferences and lookahead. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

# Limits: places in all expressions of a list together, nesting of groups, and cached sets of places.
MOST_PLACES, DEPTH, REMEMBERED = 20_000, 50, 20_000
# Steps between places that a list of expressions may take for all names; some 2 million take a second.
MOST_STEPS = 10_000_000
# Steps for which one newly computed transition counts, beside its places.
_EACH = 8

_REPEAT = re.compile(r"[*+?]|\{(?P<least>\d*)(?P<range>,(?P<most>\d*))?\}")
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_KINDS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda each: each.isalnum() or each == "_",
    "s": str.isspace,
}
_BEGIN, _END, _LAST = "begin", "end", "last"

_Test: TypeAlias = Callable[[str], bool]


class PatternError(ValueError):
    """An expression is invalid or not supported; the text says why."""


class _Place(NamedTuple):
    """A place (a state of the automaton): a `test`, and the places `after` it.

    The test is of the next character, or an anchor; without a test, the place consumes no character. `number` is that
    of the expression that ends here, else -1.
    """

    test: _Test | str | None
    after: list[int]
    number: int = -1


class _Item(NamedTuple):
    """A part of an expression: a "test", "all" of several in sequence, "any" of several, or a "repeat" of one."""

    kind: str
    test: _Test | str | None = None
    inner: tuple[_Item, ...] = ()
    least: int = 0
    most: int | None = 0


# Stands for no expression.
_NONE = 1 << 62


class _Set:
    """A set of places that a prefix of a name reaches.

    `ended` is the number of the first expression that ends at one of them; `ways` caches the sets that follow, by the
    next character.
    """

    __slots__ = ("ended", "places", "ways")

    def __init__(self, places: frozenset[int], ended: int) -> None:
        self.places, self.ended = places, ended
        self.ways: dict[str, _Set] = {}


class Expressions:
    """A list of expressions. Raises PatternError for an unsupported one, with its number first in `args`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._places: list[_Place] = []
        starts = []
        for number, pattern in enumerate(patterns):
            try:
                item = _Parser(pattern).parse()
                starts.append(self._add(item, self._place(_Place(None, [], number))))
            except PatternError as error:
                raise PatternError(number, str(error)) from None
        self._steps = 0
        self._known: dict[frozenset[int], _Set] = {}
        self._start = self._closed(starts, frozenset((_BEGIN,)))
        self._empty = self._closed(starts, frozenset((_BEGIN, _END, _LAST)))

    def first(self, name: str) -> int | None:
        """Return the number of the first expression that matches at the start of `name`, as `re.match` does, or None.

        Raises PatternError when matching takes too long.
        """
        found = _NONE
        here = self._start if name else self._empty
        # `$` also matches before a newline that is the last character.
        before = len(name) - 1 if name.endswith("\n") else -1
        for at, character in enumerate(name):
            if at == before:
                here = self._closed(here.places, frozenset((_BEGIN, _END)) if not at else frozenset((_END,)))
            found = min(found, here.ended)
            after = here.ways.get(character)
            here = self._step(here, character) if after is None else after
            if not here.places:
                break
        else:
            if name:
                here = self._closed(here.places, frozenset((_END, _LAST)))
            found = min(found, here.ended)
        return None if found == _NONE else found

    # ---- making

    def _place(self, place: _Place) -> int:
        if len(self._places) >= MOST_PLACES:
            raise PatternError(f"it is too long, or repeats too much: {MOST_PLACES} places are known at most")
        self._places.append(place)
        return len(self._places) - 1

    def _add(self, item: _Item, after: int) -> int:
        """Add `item`, which continues at place `after`. Return the place where it begins."""
        if item.kind == "test":
            return self._place(_Place(item.test, [after]))
        if item.kind == "all":
            for inner in reversed(item.inner):
                after = self._add(inner, after)
            return after
        if item.kind == "any":
            return self._place(_Place(None, [self._add(inner, after) for inner in item.inner]))
        (inner,) = item.inner
        if item.most is None:
            again = self._place(_Place(None, [after]))
            self._places[again].after.append(self._add(inner, again))
            after = again
        else:
            end = after
            for _ in range(item.most - item.least):
                after = self._place(_Place(None, [end, self._add(inner, after)]))
        for _ in range(item.least):
            after = self._add(inner, after)
        return after

    # ---- matching

    def _step(self, here: _Set, character: str) -> _Set:
        reached: list[int] = []
        for each in here.places:
            place = self._places[each]
            if callable(place.test) and place.test(character):
                reached += place.after
        self._count(len(here.places) + _EACH)
        if len(self._known) >= REMEMBERED:
            for known in (*self._known.values(), self._start):
                known.ways.clear()
            self._known.clear()
        after = here.ways[character] = self._closed(reached, frozenset())
        return after

    def _closed(self, places: Iterable[int], here: frozenset[str]) -> _Set:
        """Return the set of `places` and all that they reach without a character. `here`: the anchors that match."""
        reached: set[int] = set()
        stack = list(places)
        while stack:
            each = stack.pop()
            if each not in reached:
                reached.add(each)
                place = self._places[each]
                if place.test is None or (isinstance(place.test, str) and place.test in here):
                    stack += place.after
        self._count(len(reached))
        found = [self._places[each].number for each in reached]
        ended = min((number for number in found if number >= 0), default=_NONE)
        kept = frozenset(
            each for each in reached if self._places[each].test is not None or self._places[each].number >= 0
        )
        return self._known.setdefault(kept, _Set(kept, ended))

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise PatternError("they take too long to be matched with so many names")


def _repeats(item: _Item) -> bool:
    return item.kind == "repeat" or any(map(_repeats, item.inner))


class _Parser:
    """Reads one expression."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0

    def parse(self) -> _Item:
        item = self._any(0)
        if self._at < len(self._text):
            raise PatternError("it has a parenthesis that closes nothing")
        return item

    def _any(self, depth: int) -> _Item:
        if depth > DEPTH:
            raise PatternError(f"its groups are nested more than {DEPTH} levels deep")
        found = [self._all(depth)]
        while self._takes("|"):
            found.append(self._all(depth))
        return found[0] if len(found) == 1 else _Item("any", inner=tuple(found))

    def _all(self, depth: int) -> _Item:
        found: list[_Item] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            found.append(self._repeated(self._one(depth)))
        return _Item("all", inner=tuple(found))

    def _repeated(self, item: _Item) -> _Item:
        match = self._repeat()
        if match is None:
            return item
        self._at = match.end()
        if isinstance(item.test, str):
            raise PatternError("it repeats an anchor")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(match[0], (0, None))
        if match[0][0] == "{":
            least = int(match["least"] or 0)
            told = match["most"] if match["range"] else match["least"]
            most = int(told) if told else None
        if least > MOST_PLACES or (most or 0) > MOST_PLACES or (most is not None and most < least):
            raise PatternError(f"it repeats {match[0][:40]}")
        self._takes("?")  # lazy: does not change whether it matches
        if self._repeat() is not None or _repeats(item):
            raise PatternError("it repeats what is repeated already")
        return _Item("repeat", inner=(item,), least=least, most=most)

    def _repeat(self, at: int | None = None) -> re.Match[str] | None:
        match = _REPEAT.match(self._text, self._at if at is None else at)
        return None if match is None or match[0] == "{}" else match

    def _one(self, depth: int) -> _Item:
        character = self._text[self._at]
        self._at += 1
        if character == "(":
            if self._takes("?") and not self._takes(":"):
                raise PatternError("it has a group of a kind that is not known")
            item = self._any(depth + 1)
            if not self._takes(")"):
                raise PatternError("it has a group without an end")
            return item
        if character in "*+?" or (character == "{" and self._repeat(self._at - 1) is not None):
            raise PatternError("it repeats nothing")
        if character == "[":
            return _Item("test", self._class())
        if character == "\\":
            return _Item("test", self._escaped({"A": _BEGIN, "Z": _LAST}))
        if character == ".":
            return _Item("test", _not(_equals("\n")))
        return _Item("test", {"^": _BEGIN, "$": _END}.get(character) or _equals(character))

    def _class(self) -> _Test:
        negated = self._takes("^")
        tests: list[_Test] = []
        while True:
            if self._at >= len(self._text):
                raise PatternError("it has a class of characters without an end")
            if tests and self._takes("]"):
                break
            if self._text[self._at : self._at + 1] == "[" or self._text[self._at : self._at + 2] in _SETS:
                raise PatternError("it has a class of characters of a kind that is not known")
            low = self._in_class()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                high = self._in_class()
                if not isinstance(low, str) or not isinstance(high, str) or low > high:
                    raise PatternError("it has a range of characters that is none")
                tests.append(_between(low, high))
            else:
                tests.append(_equals(low) if isinstance(low, str) else low)
        return lambda each: any(test(each) for test in tests) != negated

    def _in_class(self) -> str | _Test:
        """Read a character, or a test for a kind of characters."""
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        letter = self._letter()
        return self._kind(letter) or _CONTROLS.get(letter, letter)

    def _escaped(self, anchors: dict[str, str]) -> _Test | str:
        letter = self._letter(anchors)
        return anchors.get(letter) or self._kind(letter) or _equals(_CONTROLS.get(letter, letter))

    def _letter(self, more: dict[str, str] | None = None) -> str:
        """Read the character after a backslash."""
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        known = letter.lower() in _KINDS or letter in _CONTROLS or letter in (more or {})
        if not letter or (not known and letter.isascii() and letter.isalnum()):
            raise PatternError(f"it has \\{letter}, which is not known")
        return letter

    def _kind(self, letter: str) -> _Test | None:
        test = _KINDS.get(letter.lower()) if letter.isascii() else None
        if test is None or letter in _CONTROLS:
            return None
        return test if letter.islower() else _not(test)

    def _takes(self, character: str) -> bool:
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True


# `re` warns of these inside a class, as they may get another meaning.
_SETS = ("--", "&&", "~~", "||")


def _equals(character: str) -> _Test:
    return lambda each: each == character


def _between(low: str, high: str) -> _Test:
    return lambda each: low <= each <= high


def _not(test: _Test) -> _Test:
    return lambda each: not test(each)
