"""A user's program, for type checkers: outputs that are verified, and mistakes that they have to find."""

from __future__ import annotations

from pathlib import Path

import ckptconv


class Bar:
    """As tqdm's bars are typed."""

    def __init__(self, iterable: object = None, desc: str | None = None, total: float | None = None) -> None:
        self.total = total

    def update(self, n: float | None = 1) -> bool | None:
        return None

    def reset(self, total: float | None = None) -> None: ...


def right(path: Path) -> None:
    ckptconv.verify(path, progress=Bar())
    ckptconv.verify(path, progress=Bar)
    ckptconv.convert(path, verify=True)
    same: ckptconv.Verification = ckptconv.verify(path, "out", dtype="fp32")
    print(same.bytes_compared + 1)
    try:
        ckptconv.verify(path)
    except ckptconv.DifferenceError as error:
        print(error.difference["what"], error.exit_code + 1)


def wrong(path: Path) -> None:
    ckptconv.verify(path, checksums=True)  # type: ignore[call-arg]
    ckptconv.verify(path, dtype="int3")  # type: ignore[arg-type]
    print(ckptconv.verify(path).bytes)  # type: ignore[attr-defined]
