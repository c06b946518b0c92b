"""Numbers of layers and experts as users write them: ranges, lists, and a file of lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.text import brief

# The largest number of a layer or an expert, and the largest file that lists experts, in bytes.
_MOST, _LARGEST = 1 << 20, 16 << 20
_HOW = "Write numbers from 0 and ranges, such as 0-3,60."


def numbers_in(text: str, called: str = "") -> list[int]:
    """Return the numbers of a text such as "0-3,60", in its order. Raise UsageError, which names the option `called`,
    if it is no such text, or has a number twice."""
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and len(last) < 8 and int(first) <= int(last) < _MOST):
            wrong = f"{brief(part)} is neither a number below {_MOST:,} nor an ascending range of such numbers"
            raise UsageError(f"{called} {brief(text)} is not a list of numbers: {wrong}.", _HOW)
        numbers += range(int(first), int(last) + 1)
        if len(numbers) > _MOST:
            raise UsageError(f"{called} {brief(text)} has more than {_MOST:,} numbers.", _HOW)
    if len({*numbers}) < len(numbers):
        twice = next(number for at, number in enumerate(numbers) if number in numbers[:at])
        raise UsageError(f"{called} {brief(text)} contains {twice} twice.", _HOW)
    return numbers


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Return the fewest ranges, each of numbers that follow one another, with these numbers in their order."""
    runs: list[range] = []
    for number in numbers:
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def text_of(numbers: Iterable[int]) -> str:
    """Return the shortest text with these numbers in their order."""
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs_of(numbers))


def numbers_of(value: Any, called: str) -> str:
    """Return the text of numbers; `value` is a text, one number, or a sequence of numbers."""
    if type(value) is int:
        value = [value]
    if isinstance(value, (list, tuple, range)) and value and all(type(number) is int for number in value):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        raise UsageError(f"{called} {brief(value)} is not a list of numbers.", _HOW)
    return text_of(numbers_in(value, called))


def experts_of(value: Any, called: str) -> tuple[str, ...]:
    """Return a text of numbers for all layers, or one for each. `value` has numbers, lists of them, or a path."""
    if isinstance(value, str) and value.endswith(".json"):
        value = _in_file(value, called)
    if isinstance(value, (list, tuple)) and not all(type(entry) is int for entry in value):
        return tuple(numbers_of(entry, f"{called}, entry {number}:") for number, entry in enumerate(value))
    return (numbers_of(value, called),)


def _in_file(path: str, called: str) -> Any:
    from ckptconv.storage import strict_json
    from ckptconv.storage.location import Location

    place = Location(path)
    place.check_file(f"{called}: {path}")
    try:
        value = strict_json.parse(place.read_text(_LARGEST))
    except ValueError as error:
        raise UsageError(f"{called}: {path} is not valid JSON: {error}.") from error
    if not isinstance(value, list) or not value:
        raise UsageError(
            f"{called}: {path} contains {brief(value)}, but a list of experts was expected.",
            "Write a list of numbers, or a list of lists of numbers.",
        )
    return value
