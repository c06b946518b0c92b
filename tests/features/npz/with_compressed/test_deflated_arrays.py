"""Archives that numpy compresses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from features.npz import test_npz


class TestDeflated(test_npz.TestNpz):
    command = "pt2safetensors"

    def write(self, place: Path) -> Path:
        chance = np.random.default_rng(0)
        noise = {name: array + chance.random(array.shape, np.float32) for name, array in test_npz.ARRAYS.items()}
        np.savez_compressed(place / "model.npz", **noise)
        return place / "model.npz"
