"""Reads a map from TOML text, and the built-in maps."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.maps.notation import MAX_LENGTH, Rule, make_rules
from ckptconv.features.maps.sizes import MAX_SIZE, Alternatives, Expression
from ckptconv.features.maps.values import parse_value
from ckptconv.text import brief, count_of, quoted, some

SUFFIX = ".toml"
# Limits of a map: bytes of its file, rules, globs of a list, sizes, and alternatives of a size.
MAX_BYTES, MAX_RULES, MAX_GLOBS, MAX_SIZES, MAX_ALTERNATIVES = 1 << 20, 2000, 100, 100, 16
_FORM = (
    "A map is a TOML file of rules. Each rule is [[rule]] and one line for each side, such as old = 'a.weight' and new "
    "= 'b.weight'. To rename without a map: --rename 'REGEX=REPL'."
)
# Advice on keeping names without a rule for each, for the sides and globs of a map.
KEEPING = "To keep names unchanged, write {} = [{}] below [keep]; to omit tensors, write it below [drop]."
_KEEPING_ANY = KEEPING.format("names", "'*.inv_freq'")
_TABLES = ("rule", "sizes", "keep", "drop")
# Texts for people: the source and the purpose of a map; a note on a rule.
_WORDS = ("about", "description", "note", "notes", "source", "sources", "title", "url", "version")
_RULE_WORDS = ("about", "note")
# The key of a rule's computed values.
_VALUES = "values"
# The key of a rule that says that every model of the map has its tensors.
_REQUIRED = "required"
# The key of a rule that says that the one tensor of a side is each of those of the other.
_COPIED = "copied"
# The keys of a rule that are no sides.
_NO_SIDES = (*_RULE_WORDS, _VALUES, _REQUIRED, _COPIED)
# The keys for globs of both sides.
_BOTH = ("names", "both", "tensors", "globs", "patterns")
# A line that begins a rule, and an index in a glob.
_HEADER = re.compile(r"\s*\[\[\s*rule\s*\]\]")
_INDEX = re.compile(r"\{\w+\}")


@dataclass(frozen=True)
class Map:
    """A map: its sides, rules, sizes, and the globs of names that are kept or dropped, by side.

    `name` is that of the file or the built-in map; `text` is the whole file, `digest` its sha256.
    """

    name: str
    sides: tuple[str, str]
    rules: tuple[Rule, ...]
    sizes: Mapping[str, Alternatives]
    keep: tuple[tuple[str, ...], tuple[str, ...]]
    drop: tuple[tuple[str, ...], tuple[str, ...]]
    words: Mapping[str, str] = field(default_factory=dict)
    text: str = field(default="", repr=False)

    @property
    def about(self) -> str:
        """Its purpose, in a line."""
        text = self.words.get("about") or self.words.get("title") or self.words.get("description") or ""
        return text.strip().partition("\n")[0]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def asks_config(self) -> bool:
        """Whether a config.json may give some of the map's sizes."""
        alternatives = itertools.chain.from_iterable(self.sizes.values())
        return any(isinstance(entry, str) for entry in alternatives) or any(rule.shifts for rule in self.rules)

    def side(self, name: str) -> int:
        """Return the number of the side called `name`. Raise UsageError if there is none."""
        if name not in self.sides:
            raise UsageError(f"The sides of the map {self.name} are {' and '.join(self.sides)}, not {quoted(name)}.")
        return self.sides.index(name)


def parse_map(text: str, name: str) -> Map:
    """Return the map in this TOML text. `name` is its file's name. Raise UsageError, which points into it, if it is
    invalid."""
    if len(text.encode()) > MAX_BYTES:
        raise UsageError(f"{name} has more than {MAX_BYTES} bytes, the limit for a map.")
    tables = _toml(text, name)
    for key, value in tables.items():
        if key not in _TABLES and not (key in _WORDS and _is_text(value)):
            raise UsageError(f"{name}: {quoted(key)} is not a key of a map.", f"{_FORM} {_KEEPING_ANY}")
    rule_tables = tables.get("rule", [])
    if (
        not isinstance(rule_tables, list)
        or not all(isinstance(table, dict) for table in rule_tables)
        or not rule_tables
    ):
        raise UsageError(f"{name} has no rules.", _FORM)
    if len(rule_tables) > MAX_RULES:
        raise UsageError(f"{name} has {len(rule_tables)} rules; a map can have at most {MAX_RULES}.")
    places = _places(text, name, len(rule_tables))
    sides = _sides(rule_tables, places)
    rules: list[Rule] = []
    for number, (rule, where) in enumerate(zip(rule_tables, places, strict=True), 1):
        texts = [_texts(rule[side], f"{where}, {side}") for side in sides]
        values = _values(rule.get(_VALUES, {}), sides, f"{where}, {_VALUES}")
        required, copied = (_flag(rule, key, where) for key in (_REQUIRED, _COPIED))
        if copied and any(values):
            raise UsageError(f"{where} has {_COPIED} = true, so it cannot have {_VALUES}.")
        rules.extend(
            replace(rule_made, values=values, required=required)
            for rule_made in make_rules(where, number, sides, texts, copied)
        )
    keep, drop = (_globs(tables.get(key, []), sides, f"{name}, [{key}]") for key in ("keep", "drop"))
    sizes = _sizes(tables.get("sizes", {}), name)
    words = {key: _joined(tables[key]) for key in _WORDS if key in tables}
    return Map(name, sides, tuple(rules), sizes, keep, drop, words, text)


def _toml(text: str, name: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {str(error)[:200]}.", _FORM) from None
    return tables


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _joined(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(value)


def _places(text: str, name: str, rules: int) -> list[str]:
    """Return the name of each rule for messages: FILE:LINE and its number, without the line if it is unknown."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    if len(lines) != rules:
        return [f"{name}, rule {number}" for number in range(1, rules + 1)]
    return [f"{name}:{line}, rule {number}" for number, line in enumerate(lines, 1)]


def _sides(rules: Sequence[Mapping[str, Any]], places: Sequence[str]) -> tuple[str, str]:
    """Return the names of the two sides, which all rules must have."""
    sides = [key for key in rules[0] if key not in _NO_SIDES]
    if len(sides) != 2:
        had = f"{count_of(len(sides), 'side')} ({some(sides)})" if sides else "no sides"
        raise UsageError(f"{places[0]} has {had}, but a rule must have two.")
    for rule, where in zip(rules, places, strict=True):
        keys = [key for key in rule if key not in _NO_SIDES]
        if {*keys} != {*sides}:
            raise UsageError(f"{where} has the sides {some(keys) or 'none'}, but rule 1 has {some(sides)}.")
    return sides[0], sides[1]


def _texts(value: Any, where: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not _is_text(texts):
        raise UsageError(f"{where} is {brief(value)}, but a string for a tensor or a list of strings was expected.")
    return list(texts)


def _flag(rule: Mapping[str, Any], key: str, where: str) -> bool:
    value = rule.get(key, False)
    if not isinstance(value, bool):
        raise UsageError(f"{where}, {key} is {brief(value)}, but true or false was expected.")
    return value


def _values(value: Any, sides: tuple[str, str], where: str) -> tuple[str, str]:
    """Return the text of the values of each side, "" for a rule without any."""
    if not value and isinstance(value, dict):
        return "", ""
    if (
        not isinstance(value, dict)
        or value.keys() != {*sides}
        or not all(isinstance(text, str) for text in value.values())
    ):
        raise UsageError(
            f"{where} is {brief(value)}, but a string for {sides[0]} and a string for {sides[1]} were expected."
        )
    for side, other in (sides, sides[::-1]):
        try:
            given = parse_value(value[side]).side
        except UsageError as error:
            raise UsageError(f"{where}, {side}: {error.message}") from None
        if given != other:
            raise UsageError(f"{where}, {side}: {quoted(value[side])} begins with {given}, not with {other}.")
    return value[sides[0]], value[sides[1]]


def _globs(value: Any, sides: tuple[str, str], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the globs of each side."""
    tables = value if isinstance(value, dict) else {_BOTH[0]: value}
    globs_of: list[list[str]] = [[], []]
    for key, globs in tables.items():
        if key not in (*sides, *_BOTH):
            raise UsageError(
                f"{where}: {quoted(key)} is neither {_BOTH[0]} nor one of the sides {' and '.join(sides)}."
            )
        texts = _texts(globs, where)
        for glob in texts:
            if len(glob) > MAX_LENGTH:
                raise UsageError(f"{where}, {quoted(glob)}: it has more than {MAX_LENGTH} characters.")
            if any(_INDEX.search(part) and not _INDEX.fullmatch(part) for part in glob.split(".")):
                raise UsageError(
                    f"{where}, {quoted(glob)}: an index must stand for a whole part of a name, between dots.",
                    "Use * for a few characters of a part.",
                )
        for number, side in enumerate(sides):
            if key == side or key not in sides:
                globs_of[number].extend(texts)
    if any(len(globs) > MAX_GLOBS for globs in globs_of):
        raise UsageError(f"{where} has more than {MAX_GLOBS} globs.")
    return tuple(globs_of[0]), tuple(globs_of[1])


def _sizes(value: Any, name: str) -> dict[str, Alternatives]:
    if not isinstance(value, dict):
        raise UsageError(f"{name}, [sizes] is {brief(value)}, but a table was expected.")
    if len(value) > MAX_SIZES:
        raise UsageError(f"{name}, [sizes] has {len(value)} sizes; a map can have at most {MAX_SIZES}.")
    sizes: dict[str, Alternatives] = {}
    for axis, value_of_axis in value.items():
        where = f"{name}, [sizes], {axis}"
        alternatives = value_of_axis if isinstance(value_of_axis, list) else [value_of_axis]
        if len(alternatives) > MAX_ALTERNATIVES:
            raise UsageError(f"{where} has {len(alternatives)} alternatives; at most {MAX_ALTERNATIVES} are allowed.")
        for entry in alternatives:
            is_number = isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= MAX_SIZE
            if not is_number and not isinstance(entry, str):
                raise UsageError(f"{where}: {brief(entry)} is neither a number from 0 to {MAX_SIZE} nor an expression.")
            if isinstance(entry, str):
                try:
                    Expression(entry)
                except UsageError as error:
                    raise UsageError(f"{where}: {error.message}") from None
        sizes[axis] = tuple(alternatives)
    return sizes


def matches(name: str, globs: Sequence[str]) -> str:
    """Return the glob that matches `name`, or an ending of it after a dot; "" if none does.

    An index, such as {l}, stands for one whole part of the name. So matching never goes back over a name.
    """
    for glob in globs:
        if _pattern(glob).match(name) or _pattern(f"*.{glob}").match(name):
            return glob
    return ""


@functools.lru_cache(8 * MAX_GLOBS)
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(_INDEX.sub("\0", glob)).replace("\0", "[^.]+"))


# ----------------------------------------------------------------------------------------------------- the catalogue


def catalogue() -> Iterator[str]:
    """Yield the names of the built-in maps, in order."""
    yield from sorted(entry.name.removesuffix(SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(SUFFIX))


@functools.lru_cache(64)
def from_catalogue(name: str) -> Map:
    """Return the built-in map of this name. Raise UsageError if there is none."""
    names = list(catalogue())
    if name not in names:
        import difflib

        words = set(re.split(r"[\W_]|(?<=[a-z])2(?=[a-z])", name.lower()))
        close = [known for known in names if words.issubset(re.split(r"[\W_]", known))] if any(words) else []
        close = close or [known for known in names if name in known] or difflib.get_close_matches(name, names)
        hint = f"Did you mean {some(close, 12, str)}?" if close else f"The maps are {some(names, 30, str)}."
        raise UsageError(f"The map {quoted(name)} does not exist.", f"{hint} Give a file as a path, such as ./my.toml.")
    return parse_map(text_of(name), name)


def text_of(name: str) -> str:
    """Return the text of the built-in map of this name, which exists."""
    text: str = _folder().joinpath(name + SUFFIX).read_text("utf-8")
    return text


def _folder() -> Any:
    from importlib import resources

    return resources.files("ckptconv.features.maps") / "catalogue"
