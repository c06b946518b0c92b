"""A configuration that says whether weights are quantized, and is not true of the output, is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from effort import every
from safetensors.torch import save_file

import ckptconv

PLAIN = {"w.weight": torch.ones(4, 2)}
CODES = {"w.weight": torch.ones(4, 2).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@every(
    "tensors, config, expected",
    [
        (PLAIN, BLOCKS, "specifies quantized weights (fp8), but the output has none"),
        (CODES, {**BLOCKS, "dtype": "bfloat16"}, ""),
        (CODES, {}, "does not specify quantization, but 'w.weight' of the output has codes or scales"),
    ],
)
def test_a_statement_about_codes_that_is_not_true_is_told(
    tensors: Mapping[str, torch.Tensor], config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    save_file(dict(tensors), tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    told = ckptconv.convert(tmp_path / "in", tmp_path / "out", copy_config=True).warnings
    assert len(told) == bool(expected), told
    assert expected in "".join(told)
