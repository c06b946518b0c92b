"""Models whose files and tensors have digests, and the digests, computed here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from ckptconv.outputs.targets import MANIFEST


def mixed_model(path: Path) -> Path:
    """Save tensors larger and smaller than what is read at a time, transposed, tied, empty, scalar; return the path."""
    state = {f"small{n}": torch.full((n,), float(n)) for n in range(1, 40)}
    state |= {"large": torch.randn(700, 1100), "transposed": torch.randn(900, 1500).t(), "tied": state["small9"]}
    state |= {"empty": torch.empty(0, 4), "also empty": torch.empty(0), "scalar": torch.tensor(2.5)}
    torch.save({**state, "epoch": 3}, path)
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def written(directory: Path) -> dict[str, bytes]:
    """The files of an output, without its manifest."""
    names = (path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: path.read_bytes() for path in names}


def with_wrong_digests(manifest: Path) -> Iterator[None]:
    """Write the manifest with a wrong digest of each file, then with one of a tensor of each; yield after each."""
    sound = manifest.read_text()
    for of_file in (True, False):
        stated = json.loads(sound)
        for entry in stated["files"].values():
            digests = entry["digests"]
            for first in [*digests["tensors"]][:1]:
                target, key = (digests, "file") if of_file else (digests["tensors"], first)
                target[key] = "0" * 64
        manifest.write_text(json.dumps(stated))
        yield
