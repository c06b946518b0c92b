"""Makes files that are one of many, or that look so."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Make = Callable[[Path], Path]
W = torch.arange(12.0).reshape(3, 4)
STATE = {"a": W, "b": torch.ones(4)}


def moved(make: Make, name: str = "model.pt") -> Make:
    """The same file, under another name and by itself."""

    def again(place: Path) -> Path:
        return Path(shutil.move(make(place), place / name))

    return again


def making(value: Any, *names: str) -> Make:
    """A file of torch.save, or of safetensors; and others beside it."""

    def make(place: Path) -> Path:
        for name in names:
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                save_file(value, path)
            elif path.suffix in (".json", ""):
                path.touch()
            elif path.suffix == ".pkl":
                path.write_bytes(pickle.dumps({"version": "2.0", "world_size": 2, "metadata": {}}))
            else:
                torch.save(value, path)
        return place / names[0]

    return make
