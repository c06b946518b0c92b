"""Text measured in the cells of a terminal: a letter may take two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def cells(text: str) -> int:
    """Return how many cells of a terminal `text` takes."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def padded(text: str, width: int, right: bool = False) -> str:
    """Return `text` padded with blanks to `width` cells, aligned left, or right if `right`."""
    blanks = " " * (width - cells(text))
    return blanks + text if right else text + blanks


def cut(text: str, width: int) -> str:
    """Return `text`, without its middle if it takes more than `width` cells. Its leading blanks stay."""
    if cells(text) <= width:
        return text
    indent = text[: min(len(text) - len(text.lstrip(" ")), width // 2)]
    room = width - len(indent) - 1
    body = text[len(indent) :].lstrip(" ")
    head, tail = "", ""
    for char in body:
        if cells(head + char) > room // 2:
            break
        head += char
    for char in reversed(body):
        if cells(head + tail + char) > room:
            break
        tail = char + tail
    return f"{indent}{head}…{tail}"


def cut_column(names: Sequence[str], width: int) -> list[str]:
    """Return `names`, each cut to `width` cells, or all in full if two different names would look alike."""
    shown = [cut(name, width) for name in names]
    return shown if len({*shown}) == len({*names}) else [*names]


def split(text: str, width: int) -> Iterator[str]:
    """Yield `text` in pieces of at most `width` cells."""
    piece = ""
    for char in text:
        if piece and cells(piece + char) > width:
            yield piece
            piece = ""
        piece += char
    yield piece


def way_into(scheme: str, names: Iterable[str], path: str) -> str:
    """Return how to specify what is in the archive at `path`: the file or directory above all `names`, or NAME."""
    top = "/".join({name.partition("/")[0] for name in names})
    known = top if top and f"a{top}".translate(dict.fromkeys(b"-_.")).isalnum() else "NAME"
    return f"one file or directory in it: {scheme}://{known}::{path.replace('<stdin>', 'FILE')}"
