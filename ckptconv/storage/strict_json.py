"""JSON that a file holds: each name once in its object, no number or text that is none, memory bounded beforehand.

Python's own parser takes up to 40 times the size of a hostile text, keeps the last of two members of one name, and
takes NaN, numbers beyond every float, and halves of surrogate pairs. Here a text whose values could take more than
`MOST` bytes is refused unread, and the members of a very large object are read in pieces, so that whoever reads them
can keep only what is needed of each.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

# Bytes of memory that a text and its values may take.
MOST = 512 << 20
# What a value costs at most, by the character that comes with it: its place in a list and a number or a short text; a
# list or an object without content; a member's name, the pair that it is read as, and its place in a dict.
_COSTS = ((",", 96), ("[", 88), ("{", 88), (":", 264))
# So many bytes of an object's members are read at a time.
PIECE = 1 << 20

_MINUS_ZERO = re.compile(r"-0(?![.\deE])")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = b" \t\n\r"
_COMMA = re.compile(rb"[ \t\n\r]*(,?)[ \t\n\r]*")

# Makes the value of an object of its members. Raises ValueError where it cannot be.
Hook: TypeAlias = "Callable[[list[tuple[str, Any]]], Any]"


class TwiceError(ValueError):
    """An object has two members of one name."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dict. Raises TwiceError for two members of one name."""
    made = dict(pairs)
    if len(made) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise TwiceError(f"it has {name[:100]!r} twice")
    return made


def parse(text: str, hook: Hook = unique, *, surrogates: bool = False) -> Any:
    """The value that `text` describes; `hook` makes the objects in it.

    With `surrogates`, text may hold halves of surrogate pairs, as names of files do that are not UTF-8. Raises
    ValueError, which says what is wrong with "it", for what is no JSON, and for more than may be read.
    """
    cost = sys.getsizeof(text)
    if len(text) * max(each for _, each in _COSTS) > MOST:
        cost += sum(text.count(character) * each for character, each in _COSTS)
    if cost > MOST:
        raise ValueError("it describes more values than can be read")
    settings: dict[str, Any] = {"parse_float": _finite, "parse_constant": _no_constant, "object_pairs_hook": hook}
    # These are rare, and to look for them at every value would take long.
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
            raise ValueError("it is not JSON that can be read: a number has too many digits") from None
        raise
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return _unicode(value) if checked else value


def members(data: bytes, hook: Hook = unique) -> Iterator[Any]:
    """What `hook` makes of the members of the object that `data` describes, of some after the other. Raises as `parse`.

    Objects among them go through `hook` too. A name may come again in another piece: the caller looks out for that.
    """
    at, stop = len(data) - len(data.lstrip(_SPACE)), len(data.rstrip(_SPACE))
    if data[at : at + 1] != b"{" or data[stop - 1 : stop] != b"}" or stop - at < 2:
        parse(_decoded(data, 0, len(data)))
        raise ValueError("it is not an object")
    at, stop, size = at + 1, stop - 1, PIECE
    while True:
        # What ends with an object's end and can be read ends with a member, for a text is read from its beginning on.
        # What cannot be read may have been cut in the middle of one: then the next is tried with more.
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
    """Where the member after the one that ends at `at` begins; `stop` if it was the last."""
    found = _COMMA.match(data, at, stop)
    if found is None or (found.end() == stop) == bool(found[1]):
        raise ValueError(f"it is not JSON: another member, or the end, was expected at byte {at}")
    return found.end()


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
    # As other parsers have it: there is no such integer.
    return -0.0 if text == "-0" else int(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is no JSON")


def _unicode(value: Any) -> Any:
    """`value`, once all text in its lists is known to be Unicode. Objects in it have been looked at before."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{each[:100]!r} holds half of a surrogate pair, which is not Unicode text") from None
        elif isinstance(each, (list, tuple)):
            stack.extend(each)
    return value
