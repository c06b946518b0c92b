"""Tar archives of torch that are changed at random."""

from __future__ import annotations

import random
import tarfile
import tempfile
from pathlib import Path

import torch
from fuzz import fuzz_files
from mutations import of_bytes, of_pickle
from tar_writer import Writer, pack


def changed_tar(chance: random.Random) -> bytes:
    """The format of torch before 0.1.10."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.pt"
        members = Writer({"a": torch.arange(6.0).view(2, 3), "b": [torch.arange(4), torch.ones(1)]}).members()
        if chance.random() < 0.7:
            name = chance.choice(["pickle", "storages", "tensors"])
            content = members[name]
            members[name] = of_pickle(content, chance) if name == "pickle" else of_bytes(content, chance)
        data = pack(members, path, chance.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])).read_bytes()
    return data if chance.random() < 0.7 else of_bytes(data, chance)


def fuzz_tars(chance: random.Random, place: Path) -> str:
    return fuzz_files(changed_tar, chance, place)
