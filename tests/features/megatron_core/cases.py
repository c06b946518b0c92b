"""The checkpoints in `data`, which Megatron-core made, and what its live model and optimizer held."""

from __future__ import annotations

import functools
import io
import tarfile
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).parent / "data"


@functools.cache
def archive(case: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of a checkpoint, and what the live model held."""
    files: dict[str, bytes] = {}
    with tarfile.open(DATA / f"{case}.tar.xz") as tar:
        for member in tar.getmembers():
            file = tar.extractfile(member)
            if file is not None:
                files[member.name.split("/", 1)[1]] = file.read()
    return files, torch.load(io.BytesIO(files.pop("expected.pt")), weights_only=True)


def unpacked(case: str, place: Path) -> Path:
    for name, data in archive(case)[0].items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return place / "checkpoint"
