"""A step with ZeRO-3's placeholders of weights is not good."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here
from safetensors.torch import save_file


def test_a_step_of_placeholders_is_not_complete(tmp_path: Path) -> None:
    for number, tensor in ((1, torch.ones(2, 3)), (2, torch.empty(0))):
        (tmp_path / f"checkpoint-{number}").mkdir()
        save_file({"a.weight": tensor, "b.weight": tensor.clone()}, tmp_path / f"checkpoint-{number}/model.safetensors")
    run = ckptconv_here("steps", tmp_path, "--json")
    assert [step["whole"] for step in run.json["steps"]] == [True, False]
    assert "have the shape [0]" in run.json["steps"][1]["why"]
