"""Quantized weights that are described and not written."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from cells import offered
from features.quantized.dialects import QUANTIZED
from safetensors.torch import load_file, save_file

import ckptconv


def test_what_is_dequantized_is_cast_as_its_file_would_be(tmp_path: Path) -> None:
    source = QUANTIZED / "bnb-nf4-in-bfloat16"
    ckptconv.convert(source, tmp_path / "m.virtual.json", dequantize=True, fsync=False)
    ckptconv.convert(tmp_path / "m.virtual.json", tmp_path / "wide", dtype="fp32", fsync=False)
    expected = load_file(source / "expected.safetensors")["m.weight"].float()
    assert torch.equal(load_file(tmp_path / "wide" / "model.safetensors")["m.weight"], expected)


def test_the_configuration_beside_it_says_what_was_made_of_the_weights(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({name: codes, f"{name}_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    plain = {"model_type": "llama", "dtype": "float16", "layers": [1, 2.5]}
    told = {**plain, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    ckptconv.convert(tmp_path, tmp_path / "x.virtual.json", dequantize=True, dtype="float32")
    for files in offered(tmp_path / "x.virtual.json"):
        assert json.loads(files.read_bytes("config.json")) == {**plain, "dtype": "float32"}
