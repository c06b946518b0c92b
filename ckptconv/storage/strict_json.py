"""Parse the JSON of a file that is not trusted: unique names, valid numbers and text only, bounded memory.

Python's own parser takes up to 40 times the size of a hostile text, keeps the last of two members of one name, and
accepts NaN, numbers beyond every float, and halves of surrogate pairs. Here a text whose values could take more than
`MOST` bytes is refused unparsed. The members of a very large object are read in pieces, so that the caller can keep
only the part of each that it needs.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, NoReturn, TypeAlias

# Most bytes of memory that a text and its values may take.
MOST = 512 << 20
# Most bytes that a value takes, by the character that comes with it: a place in a list, and a number or a short text;
# an empty list; an empty object; a member's name, the pair that it is read as, and its place in a dict.
_COSTS = ((",", 96), ("[", 88), ("{", 88), (":", 264))
# The largest count: no file system and no store allows a larger file.
_MOST_COUNT = (1 << 63) - 1
# Bytes of an object's members that are read at a time.
PIECE = 1 << 20

_CALLED = {str: "text", float: "a number", bool: "true or false", dict: "an object"}
_MINUS_ZERO = re.compile(r"-0(?![.\deE])")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = b" \t\n\r"
_COMMA = re.compile(rb"[ \t\n\r]*(,?)[ \t\n\r]*")

# A function that makes the value of an object from its members. Raises ValueError if it cannot.
Hook: TypeAlias = "Callable[[list[tuple[str, Any]]], Any]"


class TwiceError(ValueError):
    """An object has two members of the same name."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as a dict. Raises TwiceError if two members have the same name."""
    members = dict(pairs)
    if len(members) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise TwiceError(f"it has {name[:100]!r} twice")
    return members


def parse(
    text: str, hook: Hook = unique, *, surrogates: bool = False, constants: bool = False, deepest: int = 0
) -> Any:
    """Return the value of the JSON `text`; `hook` makes the objects in it.

    With `surrogates`, strings may hold halves of surrogate pairs, as names of files do that are not UTF-8. With
    `constants`, NaN and Infinity are numbers, as Python writes them. `deepest` is how many lists and objects may be
    inside one another; 0: as many as Python's parser takes. Raises ValueError if `text` is not JSON or could take more
    than `MOST` bytes; the message is a sentence about "it".
    """
    cost = sys.getsizeof(text)
    if len(text) * max(price for _, price in _COSTS) > MOST:
        cost += sum(text.count(character) * price for character, price in _COSTS)
    if cost > MOST:
        raise ValueError("it contains more values than can be read")
    settings: dict[str, Any] = {"parse_float": _finite, "object_pairs_hook": hook}
    if not constants:
        settings["parse_constant"] = _no_constant
    # Both are rare, and looking for them at every value would take long.
    if _MINUS_ZERO.search(text):
        settings["parse_int"] = _integer
    checked = not surrogates and _SURROGATE.search(text) is not None
    if checked:
        settings["object_pairs_hook"] = lambda pairs: hook(_unicode(pairs))
    try:
        value = json.loads(text, **settings)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            raise ValueError("a number in it has too many digits") from None
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if deepest:
        _check_depth(value, deepest)
    return _unicode(value) if checked else value


def _check_depth(value: Any, deepest: int) -> None:
    """Raise ValueError if more than `deepest` lists and objects are inside one another."""
    level = [value]
    for _ in range(deepest + 1):
        level = [item for container in level if isinstance(container, (dict, list)) for item in _inside(container)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {deepest} lists and objects")


def _inside(value: Any) -> Collection[Any]:
    """Return the items of a list or an object."""
    return value.values() if isinstance(value, dict) else value


def members(data: bytes, hook: Hook = unique) -> Iterator[Any]:
    """Yield the results of `hook` for the members of the JSON object `data`, piece by piece. Raises as `parse` does.

    Objects among the members go through `hook` too. A name may come again in a later piece: the caller has to check.
    """
    at, stop = len(data) - len(data.lstrip(_SPACE)), len(data.rstrip(_SPACE))
    if data[at : at + 1] != b"{" or data[stop - 1 : stop] != b"}" or stop - at < 2:
        parse(_decoded(data, 0, len(data)))
        raise ValueError("it is not an object")
    at, stop, size = at + 1, stop - 1, PIECE
    while True:
        # A piece ends with a closing brace. If it parses, it ends with a whole member, because it begins with one. If
        # it does not, it may end in the middle of a member: then take more.
        end = data.rfind(b"}", at, at + size) + 1 if at + size < stop else stop
        if end:
            try:
                piece = parse(f"{{{_decoded(data, at, end)}}}", hook)
            except TwiceError:
                raise
            except ValueError:
                if end == stop:
                    raise
            else:
                yield piece
                at, size = _after_comma(data, end, stop), PIECE
                if at == stop:
                    return
                continue
        size *= 2


def _after_comma(data: bytes, at: int, stop: int) -> int:
    """Return where the member after byte `at` begins, or `stop` at the end. Raises ValueError if there is neither."""
    match = _COMMA.match(data, at, stop)
    if match is None or (match.end() == stop) == bool(match[1]):
        raise ValueError(f"it is not JSON: another member, or the end, was expected at byte {at}")
    return match.end()


def _decoded(data: bytes, start: int, stop: int) -> str:
    try:
        return str(memoryview(data)[start:stop], "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {start + error.start}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has the number {text[:40]}, which is too large for any float")
    return value


def _integer(text: str) -> float:
    # As in other parsers. No integer is minus zero.
    return -0.0 if text == "-0" else int(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is not valid JSON")


def _unicode(value: Any) -> Any:
    """Return `value`. Raises ValueError if text in its lists is not Unicode. Its objects were checked when made."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{item[:100]!r} contains half of a surrogate pair: invalid Unicode") from None
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return value


# ------------------------------------------------------------------------------------------------------------- fields


def object_of(
    value: Any, subject: str, needed: Collection[str] | None = None, allowed: Collection[str] = ()
) -> dict[str, Any]:
    """Return `value`, which messages call `subject`. Raises ValueError if it is no object.

    If `needed` is given, it must have these members, and may have those that are `allowed`, but no others.
    """
    if type(value) is not dict:
        raise ValueError(f"{subject} is not an object: {_shown(value)}")
    if needed is not None:
        for name in sorted({*needed} - value.keys()):
            raise ValueError(f"{subject} lacks {name!r}")
        for name in sorted(value.keys() - {*needed, *allowed}):
            raise ValueError(f"{subject} has {name[:100]!r}, which is not known")
    return value


class OrNull(NamedTuple):
    """A shape of `check` that is also met by null."""

    shape: Any


def check(value: Any, shape: Any, subject: str) -> Any:
    """Return `value`, which messages call `subject`. Raises ValueError if it is not of the `shape`:

    - `int`, a count; `str`, `float`, `bool` or `dict`; `object`, anything; a range, for an integer in it; a pattern,
      for text that is matched as a whole; a frozenset, for one of its texts or truth values;
    - `[shape]`, a list; `(shape, shape)`, a list of so many;
    - `{"name": shape, "name?": shape}`, an object with these members, without any of those that have the mark;
      `{str: shape}`, one with members of any names.
    """
    if shape is object:
        return value
    if isinstance(shape, dict) and str in shape:
        for name, item in object_of(value, subject).items():
            check(item, shape[str], f"{name[:100]!r} of {subject}")
    elif isinstance(shape, dict):
        needed = [name for name in shape if name[-1] != "?"]
        for name, item in object_of(value, subject, needed, [name.rstrip("?") for name in shape]).items():
            check(item, shape[name if name in shape else f"{name}?"], f"{name!r} of {subject}")
    elif isinstance(shape, list):
        for item in list_of(value, subject):
            check(item, shape[0], f"one of {subject}")
    elif isinstance(shape, OrNull):
        if value is not None:
            check(value, shape.shape, subject)
    elif isinstance(shape, tuple):
        if len(list_of(value, subject)) != len(shape):
            raise ValueError(f"{subject} has {len(value)} values, but {len(shape)} were expected")
        for item, its in zip(value, shape, strict=True):
            check(item, its, f"a value of {subject}")
    elif shape is int:
        count_of(value, subject)
    elif isinstance(shape, range):
        if type(value) is not int or value not in shape:
            raise ValueError(f"{subject} is not an integer from {shape[0]} to {shape[-1]}: {_shown(value)}")
    elif isinstance(shape, re.Pattern):
        if not shape.fullmatch(text_of(value, subject)):
            raise ValueError(f"{subject} is not valid: {_shown(value)}")
    elif isinstance(shape, frozenset):
        if type(value) not in (str, bool) or value not in shape:
            raise ValueError(f"{subject} is not one of {', '.join(sorted(map(str, shape)))}: {_shown(value)}")
    elif type(value) is not shape:
        raise ValueError(f"{subject} is not {_CALLED[shape]}: {_shown(value)}")
    return value


def list_of(value: Any, subject: str) -> list[Any]:
    """Return `value`. Raises ValueError if it is no list."""
    if type(value) is not list:
        raise ValueError(f"{subject} is not a list: {_shown(value)}")
    return value


def text_of(value: Any, subject: str) -> str:
    """Return `value`. Raises ValueError if it is no text."""
    if type(value) is not str:
        raise ValueError(f"{subject} is not text: {_shown(value)}")
    return value


def count_of(value: Any, subject: str, most: int = _MOST_COUNT) -> int:
    """Return `value`. Raises ValueError if it is no integer from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{subject} is not a count: {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if type(value) is int and value.bit_length() > 200:
        return "a number of very many digits"
    return repr(value)[:40] if isinstance(value, (int, float, str, bool, type(None))) else f"a {type(value).__name__}"
