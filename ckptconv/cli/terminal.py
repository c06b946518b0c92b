"""Abilities of a stream: rewritten lines, and colours."""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TextIO

    from rich.console import Console

    from ckptconv.cli.lines import Line

# The width of a stream that does not report it.
_USUAL = 80
# The styles of an overview.
_STYLES = {"title": "bold", "name": "cyan", "dim": "dim", "good": "green", "warning": "yellow"}


def can_rewrite(stream: TextIO) -> bool:
    """Return whether a line can be overwritten: on a terminal that supports this and reports its size."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return False
    with contextlib.suppress(OSError, ValueError):
        return all(os.get_terminal_size(stream.fileno()))
    return False


def columns() -> int:
    """Return the number of cells in a line: from COLUMNS, the terminal of stdout, or the usual number."""
    width = os.environ.get("COLUMNS", "")
    if width.strip().isdecimal() and int(width):
        return int(width)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or _USUAL  # type: ignore[union-attr]
    return _USUAL


def width() -> int | None:
    """Return the width of the terminal in cells; None if there is none."""
    return columns() if sys.stdout.isatty() else None


def has_colours(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether to write colours: never with NO_COLOR, always with FORCE_COLOR, else if the terminal has them."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return stream.isatty() and environment.get("TERM") not in ("dumb", "unknown")


def coloured(stream: TextIO) -> Console:
    """Return a console that writes colours to `stream`, with the text unchanged."""
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=True,
        color_system="standard",
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


def styled(lines: Iterable[Line]) -> str:
    """Return styled lines as stdout shows them: in colours on a terminal that has them, else as plain text."""
    from ckptconv.text import printable

    if not has_colours(sys.stdout):
        return "".join(f"{printable(''.join(span.text for span in line))}\n" for line in lines)
    from rich.text import Text

    console = coloured(sys.stdout)
    with console.capture() as captured:  # rich would end the program when the reader closes the pipe
        for line in lines:
            console.print(Text.assemble(*((printable(span.text), _STYLES.get(span.style, "")) for span in line)))
    return captured.get()
