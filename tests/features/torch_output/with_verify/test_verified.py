"""`verify` of `.pt` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cells import verify
from checkpoints import ckptconv_here

from ckptconv import convert
from ckptconv.errors import DifferenceError

STATE = {
    "model": {
        "plain": torch.arange(12.0).view(3, 4),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "two": torch.ones(2),
    },
    "epoch": 3,
    "lr": [0.1, {"nested": torch.arange(4)}],
}


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"include": ["model.t*"]}, {"key": "model"}])
def test_files_of_torch_are_equal_to_the_safetensors_they_are_made_of(options: dict[str, Any], tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "back.pt", **options)
    done = verify(tmp_path / "model.safetensors", tmp_path / "back.pt", **options)
    assert done.tensors > 1
    assert ckptconv_here("verify", tmp_path / "model.safetensors", tmp_path / "back.pt").code == (1 if options else 0)
    if options:
        with pytest.raises(DifferenceError):
            verify(tmp_path / "model.safetensors", tmp_path / "back.pt")
