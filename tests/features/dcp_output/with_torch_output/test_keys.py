"""The key of weights in a file for torch.load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv import UsageError


def test_a_key_of_weights_in_one_file_is_met_with_what_writes_it(tmp_path: Path) -> None:
    ckptconv.save_state_dict({"w": torch.ones(2)}, tmp_path / "m.safetensors", fsync=False)
    with pytest.raises(UsageError, match="--model-key applies only to a checkpoint") as caught:
        ckptconv.convert(tmp_path / "m.safetensors", tmp_path / "out.pt", model_key="state_dict")
    assert caught.value.hint.startswith("In Python, torch.save({KEY: ckptconv.load_state_dict(INPUT)}, OUTPUT)")
    assert not (tmp_path / "out.pt").exists()
