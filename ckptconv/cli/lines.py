"""Lines of styled text, for a screen or a log, that fit a width. Pure; prints nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.cells import cells, padded, split

# Fewest cells of a screen that a label gets.
NARROW = 16


class Words(NamedTuple):
    """Text and its style: "title", "name", "dim", "good", "warning" or "" for plain."""

    text: str
    style: str = ""


Line = list[Words]


def fitted(line: Line, width: int | None) -> Line:
    """Return `line`, with its end cut off if it is wider than `width`."""
    if width is None:
        return line
    left, fitted = width, []
    for index, span in enumerate(line):
        size = cells(span.text)
        if size > left or (size == left and any(later.text.strip() for later in line[index + 1 :])):
            text = ""
            for char in span.text:
                if cells(text + char) > left - 1:
                    break
                text += char
            fitted.append(Words(text + "…", span.style))
            break
        fitted.append(span)
        left -= size
    return fitted


def table_row(indent: Words, name: Words, column: int, others: Line, width: int | None) -> Iterator[Line]:
    """Yield a row of a table: a name in a `column` of so many cells, or on separate lines if it is wider; then the
    `others`."""
    label = padded(name.text, column)
    if width is not None and cells(name.text) > column:
        for piece in split(name.text, max(width - cells(indent.text), NARROW)):
            yield [indent, name._replace(text=piece)]
            indent = indent._replace(text=" " * len(indent.text))
        label = " " * column
    yield fitted([indent, name._replace(text=label), *others], width)


def format_time(seconds: float) -> str:
    """Return a time as people say it: 90 s, 12 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, remainder = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {remainder} s" if remainder else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_memory(count: float) -> str:
    """Return `count` bytes of memory, in MiB or GiB."""
    mib = count / (1 << 20)
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"
