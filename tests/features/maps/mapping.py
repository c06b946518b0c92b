"""Checkpoints of numbers, for maps: what is where afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import evaluate
from safetensors.torch import save_file

from ckptconv import convert
from ckptconv.errors import CorruptError
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import contiguous_strides


class Checkpoint:
    """Arrays in one file, and the lazy tensors that are these arrays."""

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        data = b"".join(array.astype("i4").tobytes() for array in arrays.values())
        path.write_bytes(data)
        file, at = File(str(path), len(data)), 0
        self.arrays = dict(arrays)
        self.tensors: dict[str, LazyTensor] = {}
        for name, array in arrays.items():
            self.tensors[name] = Stored(file, at, DTYPES["int32"], array.shape, contiguous_strides(array.shape))
            at += 4 * array.size


def numbered(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Arrays of these shapes in which every number occurs once in all."""
    arrays, at = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(at, at + size, dtype="i4").reshape(shape)
        at += size
    return arrays


def values(tensors: Mapping[str, LazyTensor]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(evaluate(each), "i4").reshape(each.shape) for name, each in tensors.items()}


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def check_copies(kind: str, where: Path) -> None:
    """Check that an output of a kind takes tensors that a map makes one, and refuses them if they differ."""
    (where / "map.toml").write_text('[[rule]]\ncopied = true\njoined = "qkv"\napart = ["q", "k"]\n')
    for name, other in (("equal", 1), ("different", 2)):
        save_file({"q": torch.ones(2), "k": torch.full((2,), float(other))}, where / f"{name}.safetensors")
    convert(where / "equal.safetensors", where / "out", map=where / "map.toml", to=kind)
    with pytest.raises(CorruptError, match=r"'qkv' is stored twice, .*different values"):
        convert(where / "different.safetensors", where / "other", map=where / "map.toml", to=kind)
    assert not (where / "other").exists()
