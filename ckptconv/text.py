"""Sizes as people write them: `5GB` is 5·10⁹ bytes, `1GiB` is 2³⁰, a plain integer counts bytes. Values in messages."""

from __future__ import annotations

import re
from typing import Any

from ckptconv.errors import UsageError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {letter: 1 << (10 * power) for power, letter in enumerate(("", "K", "M", "G", "T", "P"))}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Return the number of bytes that `text` says. Raises UsageError, naming `option`, if it is not a size."""
    match = _SIZE.fullmatch(text)
    if match:
        number, letter, binary, _ = match.groups()
        scale = (_BINARY if binary else _DECIMAL)[letter.upper()]
        whole = int(number) * scale if number.isdigit() else round(float(number) * scale)
        if whole > 0 and (letter or not binary):
            return whole
    raise UsageError(f"{option} {text!r} is not a size.", "Sizes are written as 5GB, 512MiB or 1000000.")


def parse_count(text: str, option: str, most: int) -> int:
    """Return the number from 1 to `most` that `text` is. Raises UsageError, naming `option`, if it is none."""
    if text.isdecimal() and len(text) < 20 and 1 <= int(text) <= most:
        return int(text)
    raise UsageError(f"{option} {text!r} is not a number from 1 to {most}.")


def format_size(count: float) -> str:
    """Return `count` bytes in decimal units with three digits: 1.67 GB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    if unit == "bytes":
        return f"{count:.0f} {'byte' if count == 1 else unit}"
    return f"{count:.{max(0, 2 - len(str(int(count))) + 1)}f} {unit}"


def format_time(seconds: float) -> str:
    """Return a time as people say it: 90 s, 12 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_memory(count: float) -> str:
    """Return `count` bytes of memory, in MiB or GiB."""
    mib = count / (1 << 20)
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"


# How many elements of a tuple or list are shown.
_SHOWN = 8


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
