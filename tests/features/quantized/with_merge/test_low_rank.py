"""A low-rank part of a quantized weight is what an adapter of the same factors is: both are added in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFIED
from features.quantized.dialects import QUANTIZED
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import ckptconv

CASE = QUANTIZED / "modelopt-nvfp4-svd"
FACTOR = ".weight_quantizer._svdquant_lora_"


def taken_apart(place: Path) -> tuple[Path, Path]:
    """Save the codes of the case as NVFP4_AWQ, and its factors, the second one smoothed, as an adapter."""
    codes, adapter = place / "codes", place / "adapter"
    parts: dict[str, torch.Tensor] = load_file(CASE / "model.safetensors")
    for directory in (codes, adapter):
        directory.mkdir()
    config = (CASE / "config.json").read_text().replace("NVFP4_SVD", "NVFP4_AWQ")
    (codes / "config.json").write_text(config)
    save_file({name: part for name, part in parts.items() if FACTOR not in name}, codes / "model.safetensors")
    factors = {}
    for name, part in parts.items():
        module, lora, factor = name.partition(FACTOR)
        if lora:
            smoothing = parts[f"{module}.pre_quant_scale"].float() if factor == "a" else 1
            # The product of two numbers of 8 bits is exact.
            factors[f"base_model.model.{module}.lora_{factor.upper()}.weight"] = part.float() * smoothing
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return codes, adapter


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_it_is_what_merge_makes_of_the_codes_and_an_adapter(dtype: str, tmp_path: Path) -> None:
    codes, adapter = taken_apart(tmp_path)
    options: dict[str, Any] = {"dequantize": True, "dtype": dtype, "fsync": False, **VERIFIED}
    ckptconv.merge(codes, adapter, tmp_path / "merged", **options)
    ckptconv.convert(CASE, tmp_path / "whole", **options)
    merged, whole = (bits_in(tmp_path / name / "model.safetensors") for name in ("merged", "whole"))
    assert merged.keys() == whole.keys()
    assert all(np.array_equal(merged[name], whole[name]) for name in whole)


def bits_in(path: Path) -> dict[str, NDArray[Any]]:
    return {name: part.contiguous().view(torch.uint8).numpy() for name, part in load_file(path).items()}
