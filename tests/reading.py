"""Reading what a conversion writes, by safetensors itself; and the bytes that are read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checkpoints import load_with_aliases, metadata_of
from records import read_by_the_book
from safetensors.torch import load_file

import ckptconv
from ckptconv.structure.record import FILE_NAME, METADATA_KEY

KIB = 1 << 10


def converted(checkpoint: object, place: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of a conversion, as safetensors itself reads them, under all their names."""
    ckptconv.convert(checkpoint, place, fsync=False, **options)  # type: ignore[arg-type]
    return load_with_aliases(place)


def state_in(output: Path) -> Any:
    """The state in an output, one file or a directory: nested as it was saved if there is a structure record."""
    files = sorted(output.glob("*.safetensors")) if output.is_dir() else [output]
    if (output / FILE_NAME).exists():
        record: str | None = (output / FILE_NAME).read_text("utf-8")
    else:
        record = metadata_of(files[0]).get(METADATA_KEY)
    if record is None:
        return load_with_aliases(output)
    return read_by_the_book({name: tensor for file in files for name, tensor in load_file(file).items()}, record)


def state_of(source: object, **options: Any) -> Any:
    """The state that a conversion of `source` writes."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "x.safetensors"
        ckptconv.convert(source, output, fsync=False, **options)  # type: ignore[arg-type]
        return state_in(output)


def states_of(source: object, **options: Any) -> dict[str, torch.Tensor]:
    """The optimizer's states that a conversion of `source` writes, by name."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "x.safetensors"
        ckptconv.convert(source, optimizer=output, fsync=False, **options)  # type: ignore[arg-type]
        return load_with_aliases(output)


class Reads:
    """What was read of local files since it was made."""

    def __init__(self) -> None:
        self.nbytes = self.calls = 0


@contextmanager
def counted() -> Iterator[Reads]:
    """Count the bytes that the operating system reads for this process from files."""
    reads = Reads()
    preadv, pread = os.preadv, os.pread

    def counting_preadv(*args: Any) -> int:
        count = preadv(*args)
        reads.nbytes, reads.calls = reads.nbytes + count, reads.calls + 1
        return count

    def counting_pread(*args: Any) -> bytes:
        data = pread(*args)
        reads.nbytes, reads.calls = reads.nbytes + len(data), reads.calls + 1
        return data

    with mock.patch.object(os, "preadv", counting_preadv), mock.patch.object(os, "pread", counting_pread):
        yield reads
