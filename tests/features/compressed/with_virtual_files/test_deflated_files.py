"""What is made of deflated archives, without being written."""

from __future__ import annotations

from pathlib import Path

import torch
from features.compressed.test_compressed import deflated

import ckptconv
from ckptconv.features.virtual_files.files import VirtualFiles
from ckptconv.formats.registered import DESCRIBING


def test_any_range_is_that_of_the_file(tmp_path: Path) -> None:
    tree = {"a": torch.arange(999), "b": torch.ones(7, 70).t(), "c": torch.zeros(800)}
    torch.save(tree, tmp_path / "plain.pt")
    source, output = deflated(tmp_path / "plain.pt", tmp_path / "packed.pt"), tmp_path / "out"
    ckptconv.convert(source, output, fsync=False)
    places = [source]
    for suffix in DESCRIBING:
        places.append(tmp_path / f"described{suffix}")
        ckptconv.convert(source, places[-1], fsync=False)
    expected = (output / "model.safetensors").read_bytes()
    for place in places:
        with VirtualFiles(place) as files:
            for start in range(0, len(expected), 1001):
                stop = min(start + 1500, len(expected))
                assert files.read_bytes("model.safetensors", start, stop) == expected[start:stop]
