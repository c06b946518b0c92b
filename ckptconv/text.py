"""Values as people write them and as messages show them: sizes, counts, parts of a whole, times.

`5GB` is 5·10⁹ bytes, `1GiB` is 2³⁰, and a plain integer counts bytes.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Collection
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from ckptconv.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

# The hint for an empty word of a command line.
UNSET = "Is a shell variable not set?"
# Characters of a name shown in a message.
LONGEST = 200
# Python prints no integer of more than about 14,000 bits.
_MOST_BITS = 1 << 12
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {letter: 1 << (10 * power) for power, letter in enumerate(("", "K", "M", "G", "T", "P"))}
# The beginning of a URL, then its password, or the query of one of HTTP, without punctuation after it.
_PASSWORD = re.compile(r"(://[^\s/@:]{0,1000}:)[^\s/@]+(?=@)")
_QUERY = re.compile(r"""(https?://[^\s?"'<>]{0,1000}\?)[^\s"'<>]*[^\s"'<>.,:;)]""")
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)


def whole(value: Any) -> int | None:
    """Return `value` as a plain int if it is an integer of any type; None for others, and for True and False."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def parse_size(value: Any, option: str) -> int:
    """Return the number of bytes in `value`, text or an integer. Raises UsageError, naming `option`, without one."""
    size = whole(value) or 0
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match:
        number, letter, binary, _ = match.groups()
        scale = (_BINARY if binary else _DECIMAL)[letter.upper()]
        if letter or not binary:
            size = int(number) * scale if number.isdecimal() else round(float(number) * scale)
    if size > 0:
        return size
    raise UsageError(f"{option} {brief(value)} is not a size.", "Write a size such as 5GB, 512MiB or 1000000.")


def parse_count(value: Any, option: str, least: int, most: int) -> int:
    """Return the number from `least` to `most` in `value`, text or an integer. Raises UsageError, naming `option`, if
    there is none."""
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 20
    count = int(value) if is_number else whole(value)
    if count is not None and least <= count <= most:
        return count
    raise UsageError(f"{option} {brief(value)} is not a number from {least} to {most}.")


def format_size(count: float) -> str:
    """Return `count` bytes in decimal units with three digits: 1.67 GB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    if unit == "bytes":
        return f"{count:.0f} {'byte' if count == 1 else unit}"
    return f"{count:.{max(0, 2 - len(str(int(count))) + 1)}f} {unit}"


def install(extra: str) -> str:
    """Return the advice to install one of this package's extras."""
    return f"Install it: pip install 'ckptconv[{extra}]'."


def quoted(name: str, limit: int = 100) -> str:
    """Return a name as a message shows it: in quotes, and of a longer one the first `limit` characters."""
    return repr(name if len(name) <= limit else f"{name[:limit]}…")


_Item = TypeVar("_Item")


def some(items: Collection[_Item], most: int = 5, form: Callable[[_Item], str] = quoted) -> str:  # type: ignore[assignment]
    """Return the first `most` of `items`, each as `form` writes it, and the number of others: a, b and 7 more."""
    few = ", ".join(form(item) for item in islice(items, most))
    return f"{few} and {len(items) - most} more" if len(items) > most else few


# Elements of a tuple or list that are shown.
_SHOWN = 8


# Hosts of the Hugging Face hub, which people copy without https://.
_HUB = ("hf.co", "huggingface.co", "www.huggingface.co")


class Proposed(str):
    """A path to write to that the user did not type as OUTPUT. `hint` says how to have a present file replaced."""

    hint: str

    def __new__(cls, path: str, hint: str) -> Self:
        proposed = super().__new__(cls, path)
        proposed.hint = hint
        return proposed

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.hint


class LastWord(Proposed):
    """The last word of a command that takes several inputs: if it exists, it may be one of them."""


def parse_path(value: object, called: str = "") -> str:
    """Return a path or URL as text: a file:// URL as the local path that it names, hf.co/org/model without a scheme as
    hf://org/model unless there is such a path. Raise UsageError, which names it `called`, for any other value."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        is_state = hasattr(value, "state_dict") or (isinstance(value, dict) and {*map(type, value.values())} != {str})
        is_data = isinstance(value, (bytes, bytearray, memoryview)) or hasattr(value, "read")
        of_data = "Write it to a file, and give the path of the file." if is_data else ""
        hint = "ckptconv.save_state_dict(STATE, PATH) writes a state dict." if is_state else of_data
        raise UsageError(f"{called} {brief(value)} is not a path.".lstrip(), hint)
    if "\0" in path:
        raise UsageError(f"{called} {brief(path)} is not a path: names cannot contain a NUL character.".lstrip())
    host, slash, after = path.partition("/")
    if slash and host in _HUB and not os.path.lexists(path):
        # The address of a page about a file is refused as a page.
        local = (
            f"https://{path}" if any(f"/{word}/" in after for word in ("tree", "blob", "resolve")) else f"hf://{after}"
        )
    else:
        local = path.removeprefix("file://")
    return type(value)(local, value.hint) if isinstance(value, Proposed) else local


def name_of(key: object) -> str:
    """Return a key of a file as a name. Raise CorruptError for an integer of more digits than Python prints."""
    if type(key) is int and key.bit_length() > _MOST_BITS:
        raise CorruptError(f"A name is {brief(key)}, an integer with too many digits.")
    return str(key)


def brief(value: object, limit: int = 60) -> str:
    """Return any value of a file as a message shows it: in at most `limit` characters, all of them printable.

    Never raises, even for integers of more than some thousand digits, which Python itself does not print. A class is
    shown as its dotted name, text and bytes as Python writes them, a value without a short form as its type's name.
    """
    shown = _shown(value, limit, 2)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _shown(value: Any, limit: int, levels: int) -> str:
    kind = type(value)
    if kind is int:
        bits = value.bit_length()
        return str(value) if bits <= 3 * limit else f"{'-' if value < 0 else ''}2^{bits - 1} or more"
    if kind in (str, bytes, bytearray):
        part = value[: limit + 1]
        return repr(bytes(part) if kind is bytearray else part)
    if hasattr(kind, "brief"):
        return str(value.brief(limit))
    if kind in (bool, float, complex, type(None), type(...)):
        return repr(value)
    if levels and isinstance(value, (tuple, list)):
        parts = [_shown(part, limit, levels - 1) for part in value[:_SHOWN]]
        parts += ["…"] * (len(value) > _SHOWN)
        first, last = "[]" if isinstance(value, list) else "()"
        only = "," if len(value) == 1 and first == "(" else ""
        return f"{first}{', '.join(parts)}{only}{last}"
    return kind.__name__


def is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogates, which neither UTF-8 nor JSON can represent."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


def reason(error: OSError) -> str:
    """Return the operating system's message, without its number and path."""
    return (error.strerror or str(error) or type(error).__name__).lower()


def count_of(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return `text` with control characters escaped, as names in files may have them, and without secrets of URLs."""
    text = _QUERY.sub(r"\1...", _PASSWORD.sub(r"\1...", text))
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
