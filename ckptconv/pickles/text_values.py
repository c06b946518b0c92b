"""Numbers and strings that a pickle has as lines of text, as those of protocol 0.

Each function takes the line, without its newline, and the run, whose limits hold, and which notes oddities.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import re

from ckptconv.pickles.calls import Calls
from ckptconv.pickles.vocabulary import ExcessiveError, MalformedError
from ckptconv.text import brief

# Python itself reads integers of no more digits.
_MAX_DIGITS = 4300
# Numbers in text, as picklers write them. CPython's two unpicklers accept other forms, each its own.
_WHOLE = re.compile(rb"0|-?[1-9][0-9]*")
_ACCEPTED = re.compile(rb"\s*[-+]?[0-9]\w*\s*")
_REAL = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# Valid escapes in strings; group 1 is a backslash that begins none.
_ESCAPES = re.compile(rb"\\(?:[\\'\"abfnrtv\n]|[0-3]?[0-7]{1,2}(?![0-7])|[0-3][0-7]{2}|x[0-9a-fA-F]{2})|(\\)")
# As numbers are spelled that have no digits. Each NaN is an object, and a key, of its own.
_SPECIAL = frozenset((b"inf", b"-inf", b"nan"))


def integer(line: bytes, run: Calls) -> int:
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else _digits(line, run)


def long(line: bytes, run: Calls) -> int:
    return _digits(line.removesuffix(b"L"), run)


def index(line: bytes, run: Calls) -> int:
    number = _digits(line, run)
    if number < 0:
        raise MalformedError("has a negative index")
    return number


def _digits(line: bytes, run: Calls) -> int:
    # To CPython's C unpickler, a null byte ends the number, though not the line.
    number = line.partition(b"\0")[0]
    if not _ACCEPTED.fullmatch(number):
        raise MalformedError(f"has {brief(line)[1:]} instead of a number")
    # A byte holds 2.4 digits.
    if len(number) > min(run.limits.int_bytes * 12 // 5, _MAX_DIGITS):
        raise ExcessiveError(f"has an integer of {len(number)} digits")
    if not _WHOLE.fullmatch(line):
        run.odd(f"has {brief(line)[1:]} instead of a number")
    with contextlib.suppress(ValueError):
        return int(number)
    return 0


def real(line: bytes, run: Calls) -> float:
    value = float(line) if _REAL.fullmatch(line) or line in _SPECIAL else None
    # For a number that is too large, one of CPython's unpicklers makes infinity; the other refuses it.
    if value is None or (math.isinf(value) and line not in _SPECIAL):
        run.odd(f"has {brief(line)[1:]} instead of a number")
        return 0.0
    return value


def quoted(line: bytes, run: Calls) -> bytes:
    """Return the bytes of a string in quotes."""
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise MalformedError("has a string without quotes")
    if any(escape[1] for escape in _ESCAPES.finditer(line[1:-1])):
        # Python only warns, and reads something else.
        run.odd("has a string with an invalid escape")
        return b""
    return codecs.escape_decode(line[1:-1])[0]
