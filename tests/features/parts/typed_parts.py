"""A user's program, for type checkers: calls that are right, and mistakes that they have to find."""

from __future__ import annotations

from pathlib import Path

import ckptconv


def right(path: Path) -> None:
    ckptconv.convert(path, part=(0, 2))
    ckptconv.convert(path, part="1/2")
    report: ckptconv.Report = ckptconv.finish(["a", path], checksum=True, progress=print)
    print(report.finished)


def wrong(path: Path) -> None:
    ckptconv.finish(path, dtype="bf16")  # type: ignore[call-arg]
    ckptconv.convert(path, part=0.5)  # type: ignore[arg-type]
