"""Tables that compare an output with its reference, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.cells import cut_column
from ckptconv.text import count_of, some

if TYPE_CHECKING:
    from ckptconv.features.like.report import LikeReport

# Rows of a table that are shown, as --json has more, and cells of a name.
MOST, NAME = 40, 100


def summary(like: LikeReport, verbose: bool) -> list[str]:
    """Return the lines about an output and its reference: a sentence, and the table of its tensors if there is one."""
    parts = [f"{count_of(like.matched, 'tensor')} of the input"]
    if like.filled:
        parts.append(
            f"{len(like.filled):,} copied from the reference ({some(like.filled, len(like.filled) if verbose else 3)})"
        )
    parts += [f"{count:,} cast from {cast}" for cast, count in like.casts.items()]
    rows = [
        (
            row.tensor,
            "(the reference)" if row.source is None else row.source,
            row.dtype if row.dtype == row.source_dtype else f"{row.source_dtype} to {row.dtype}",
            row.file,
        )
        for row in like.tensors
    ]
    table = _table(("tensor", "from", "dtype", "file"), rows, len(rows) if verbose else MOST) if rows else []
    return [f"like {like.reference}: {', '.join(parts)}", *table]


def differences(difference: Mapping[str, Any]) -> list[str]:
    """Return the table of the tensors that a source and its reference do not have in common."""
    rows = [(row["what"], row["tensor"], _kind(row["expected"]), _kind(row["found"])) for row in difference["tensors"]]
    total = sum(count for kind, count in difference["counts"].items() if kind != "matched")
    return _table(("", "tensor", "reference", "input"), rows, MOST, total)


def _kind(kind: Mapping[str, Any] | None) -> str:
    return f"{kind['dtype']} {kind['shape']}" if kind else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], most: int, total: int | None = None) -> list[str]:
    """Return `head` and at most `most` of the `rows` in columns, with the number of the others, of `total` rows."""
    columns = zip(head, *rows[:most], strict=True)
    shown = [*zip(*(cut_column(column, NAME) for column in columns), strict=True)]
    widths = [max(len(row[at]) for row in shown) for at in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    left = (len(rows) if total is None else total) - len(shown) + 1
    return [f"  {line}" for line in [*lines, *([f"and {left:,} more"] if left else [])]]
