"""The folder of a step that was read is not named among what the output lacks."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from ckptconv import convert


def test_the_folder_of_the_weights_of_accelerate_is_not_left(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "m.safetensors")
    convert(tmp_path / "m.safetensors", tmp_path / "step", to="accelerate")
    (tmp_path / "step" / "more").mkdir()
    assert {path.name for path in (tmp_path / "step").iterdir()} == {"pytorch_model_fsdp_0", "more"}
    report = convert(tmp_path / "step", tmp_path / "out")
    assert report.left == {str(tmp_path / "step" / "more"): "folders are not copied"}
