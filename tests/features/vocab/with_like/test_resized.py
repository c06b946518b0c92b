"""The new rows of a resized vocabulary are left out to be like the model before the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptconv


def test_the_advice_about_a_resized_vocabulary_works(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    resized = torch.arange(26.0).reshape(13, 2)
    for file, rows in (("base", 12), ("trained", 13)):
        save_file({name: resized[:rows].clone()}, tmp_path / f"{file}.safetensors")
    given = (tmp_path / "trained.safetensors", tmp_path / "out.safetensors")
    with pytest.raises(ckptconv.DifferenceError) as caught:
        ckptconv.convert(*given, like=tmp_path / "base.safetensors")
    assert caught.value.hint.endswith("To omit the new rows, add --vocab 12.")
    ckptconv.convert(*given, like=tmp_path / "base.safetensors", vocab=12, fsync=False)
    assert torch.equal(load_file(given[1])[name], resized[:12])
