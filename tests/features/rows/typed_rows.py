"""A user's program, for type checkers: calls that are right, and mistakes that they have to find."""

from __future__ import annotations

from pathlib import Path

import ckptconv


def right(path: Path) -> None:
    ckptconv.split_rows(path, "out", embedding_dim=64, method="adam", names=["t"], fsync=False)
    ckptconv.pack_rows([path], "out", names={"weight": "w"}, max_dim=8)
    ckptconv.check_rows(path, bucket_size=8, progress=print)


def wrong(path: Path) -> None:
    ckptconv.split_rows(path, "out", embeding_dim=64)  # type: ignore[call-arg]
    ckptconv.check_rows(path, bucket_size="many")  # type: ignore[arg-type]
