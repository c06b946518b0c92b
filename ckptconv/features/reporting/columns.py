"""Lines of tables: cells below each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ckptconv.cells import padded


def in_columns(rows: Sequence[Sequence[str]], right: Collection[int]) -> Iterator[str]:
    """Yield a line for each row. The columns with numbers in `right` are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (padded(cell, width, at in right) for at, (cell, width) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()
