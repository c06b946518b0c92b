"""A user's program, for type checkers: calls that are right, and mistakes that they have to find."""

from __future__ import annotations

from pathlib import Path

import ckptconv


def right(path: Path) -> None:
    summary: ckptconv.Summary = ckptconv.inspect(path, stats=True, as_="bf16")
    for each in summary.tensors:
        print(each.name.upper(), each.shape[0], each.stats.nan if each.stats else 0)
    if summary.conversion:
        print(summary.conversion.bytes_to_read + 1)


def wrong(path: Path) -> None:
    ckptconv.inspect(path, jobs=3)  # type: ignore[call-arg]
    print(ckptconv.inspect(path).tensors[0].size)  # type: ignore[attr-defined]
