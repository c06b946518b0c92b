"""A configuration that is read, and not copied, stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckptconv


def test_a_configuration_that_says_how_weights_are_quantized_is_named(tmp_path: Path) -> None:
    here = tmp_path / "in"
    here.mkdir()
    codes, scale = torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    save_file({"a.weight": codes, "a.weight_scale_inv": scale}, here / "model.safetensors")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (here / "config.json").write_text(json.dumps({"quantization_config": blocks}))
    report = ckptconv.convert(here, tmp_path / "out", dequantize=True, copy_config=False, fsync=False)
    assert report.left == {str(here / "config.json"): "--no-copy-config"}
