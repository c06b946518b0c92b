"""What is kept in temporary files without a name: a checkpoint to be read so, and how much a process has in them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import numbers

from ckptconv.conversion import convert

MIB = 1 << 20


def tree() -> dict[str, Any]:
    base = numbers(torch.float32, 300, 400)
    return {
        "noise": base,
        "column": base[:, 7],
        "transposed": base.t(),
        "zeros": torch.zeros(500_000),
        "half": numbers(torch.bfloat16, 1000),
        "none": torch.ones(0),
        "tied": base,
        "plain": 3,
    }


def saved(directory: Path) -> tuple[Path, bytes]:
    """The tree as `torch.save` writes it, and what it is converted to."""
    path, output = directory / "model.pt", directory / "expected.safetensors"
    torch.save(tree(), path)
    convert(path, output)
    return path, output.read_bytes()


def plain_and_expected() -> tuple[Any, Any, Any]:
    """The fixtures `both`, `plain` and `expected` of a module: the file of `saved`, and what it is converted to."""

    @pytest.fixture(scope="module")
    def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
        return saved(tmp_path_factory.mktemp("plain"))

    @pytest.fixture
    def plain(both: tuple[Path, bytes]) -> Path:
        return both[0]

    @pytest.fixture
    def expected(both: tuple[Path, bytes]) -> bytes:
        return both[1]

    return both, plain, expected


def without_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, file systems have no files without names."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


def spooled(pid: int) -> int:
    """The bytes in files without a name that a process has open."""
    sizes = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/{pid}/fd/{fd}")
            if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                sizes += status.st_size
    return sizes
