"""A user's program, which type checkers read: what they accept, and, with an ignore, what they refuse.

An ignore that nothing needs is an error of mypy's too: each of them is a mistake that is found.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import ckptconv

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Bfloat16:
    """As torch's dtypes are typed."""

    is_floating_point: bool = True
    is_complex: bool = False

    def to_real(self) -> Bfloat16:
        return self


class Bar:
    """As tqdm's bars are typed."""

    def __init__(self, iterable: object = None, desc: str | None = None, total: float | None = None) -> None:
        self.total = total

    def update(self, n: float | None = 1) -> bool | None:
        return None

    def reset(self, total: float | None = None) -> None: ...


class Tasks:
    """As rich's progress is typed."""

    def add_task(
        self, description: str, start: bool = True, total: float | None = 100.0, completed: int = 0, **fields: object
    ) -> int:
        return 0

    def advance(self, task_id: int, advance: float = 1) -> None: ...


def convert(source: str | os.PathLike[str], **options: Unpack[ckptconv.ConvertOptions]) -> int:
    """Passes options on."""
    report: ckptconv.Report = ckptconv.convert(source, "out", **options)
    return report.bytes_written


def right(path: Path, size: int, done: list[int]) -> None:
    convert(path, dtype="bf16", max_shard_size="5GB")
    ckptconv.convert(path, dtype=Bfloat16(), max_shard_size=size, include=["a", "b"], tied="alias")
    ckptconv.convert(path, path, storage_options={"anon": True}, spool_dir=path, jobs=None)
    ckptconv.convert(path, progress=True)
    ckptconv.convert(path, progress=print)
    ckptconv.convert(path, progress=lambda count: done.append(count + 1))
    ckptconv.convert(path, progress=Bar())
    ckptconv.convert(path, progress=Bar)
    ckptconv.convert(path, progress=Tasks())
    ckptconv.convert(path, progress=done.append, on_total=print, before_commit=lambda: None)
    flat, structure = ckptconv.flatten({"a": 1})
    print(flat.keys(), structure)
    try:
        ckptconv.convert(path)
    except ckptconv.DifferenceError as error:
        print(error.difference["what"], error.exit_code + 1)
    except (ckptconv.NoTensorError, ckptconv.StoppedError) as error:
        print(error.hint.upper())


def wrong(path: Path) -> None:
    ckptconv.convert(path, dtpe="bf16")  # type: ignore[call-arg]
    ckptconv.convert(path, dtype=16)  # type: ignore[arg-type]
    ckptconv.convert(path, dtype="int3")  # type: ignore[arg-type]
    ckptconv.convert(path, dtype="float64")  # type: ignore[arg-type]
    ckptconv.convert(path, tied="aliases")  # type: ignore[arg-type]
    ckptconv.convert(path, max_shard_size=5e9)  # type: ignore[arg-type]
    ckptconv.convert(path, include={"a"})  # type: ignore[arg-type]
    ckptconv.convert(path, fsync="no")  # type: ignore[arg-type]
    ckptconv.convert(path, progress=3)  # type: ignore[arg-type]
    ckptconv.convert(path, on_total=lambda: None)  # type: ignore[arg-type, misc]
    ckptconv.convert()  # type: ignore[call-arg]
    ckptconv.convert(path, checksums=True)  # type: ignore[call-arg]
    print(ckptconv.convert(path).bytes)  # type: ignore[attr-defined]
    ckptconv.load(path)  # type: ignore[attr-defined]
    raise ckptconv.UsageError  # type: ignore[call-arg]
