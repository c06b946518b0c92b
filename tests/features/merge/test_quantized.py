"""Merges into quantized weights: their products are added to, and what is made is rounded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFIED, of_features
from effort import every
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.options.table import OPTIONS

if "dequantize" not in OPTIONS:
    pytest.skip("there are no quantized weights", allow_module_level=True)

(dialects,) = of_features("DIALECTS")
CASES, MADE_CODES, QUANTIZED = dialects.CASES, dialects.MADE_CODES, dialects.QUANTIZED
nearest, numbers, products = dialects.nearest, dialects.numbers, dialects.products


def adapter_of(name: str, shape: tuple[int, ...], place: Path) -> tuple[Path, NDArray[Any]]:
    """Save an adapter of rank 1 of the weight of this name. Return where, and what it adds, which is exact."""
    place.mkdir()
    chance = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-8, 9, sides, generator=chance).float() / 64 for sides in ((shape[0], 1), (1, shape[1]))
    )
    module = f"base_model.model.{name.removesuffix('.weight')}"
    save_file({f"{module}.lora_A.weight": right, f"{module}.lora_B.weight": left}, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    return place, numbers(left) @ numbers(right)


@every("case", CASES)
def test_an_adapter_of_a_weight_of_every_dialect_is_added_before_it_is_rounded(case: str, tmp_path: Path) -> None:
    exact, source = products(case, tmp_path), QUANTIZED / case
    named = [name for name in exact if name.endswith("_proj.weight") or name == "m.weight"]
    # A factor of a matrix does not fit a stack of experts.
    matrices = [name for name in named if len(exact[name].shape) == 2]
    for number, name in enumerate(matrices[:1]):
        adapter, more = adapter_of(name, tuple(exact[name].shape), tmp_path / f"adapter{number}")
        ckptconv.merge(source, adapter, tmp_path / "merged", dequantize=True, **VERIFIED, fsync=False)
        merged = load_file(tmp_path / "merged" / "model.safetensors")[name]
        assert np.array_equal(numbers(merged), nearest(numbers(exact[name]) + more, "bfloat16"), equal_nan=True), name
        if case not in MADE_CODES:
            continue
        # Codes of what is merged are those of float32, to which it is rounded first: bfloat16 would give others.
        ckptconv.merge(source, adapter, tmp_path / "single", dequantize=True, dtype="fp32", fsync=False)
        options: dict[str, Any] = {"quantize": "fp8-block", "fsync": False}
        ckptconv.merge(source, adapter, tmp_path / "codes", dequantize=True, **options)
        ckptconv.convert(tmp_path / "single", tmp_path / "again", **options)
        codes, again = (load_file(tmp_path / each / "model.safetensors") for each in ("codes", "again"))
        for part in parts_of(name):
            assert torch.equal(codes[part].view(torch.uint8), again[part].view(torch.uint8)), part


def parts_of(name: str) -> tuple[str, str]:
    return name, f"{name}_scale_inv"


def test_what_modules_to_save_replace_is_quantized_as_it_was_saved(tmp_path: Path) -> None:
    """The base is bfloat16, and the adapter's own float32: its codes are those of float32."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    for directory in ("base", "adapter", "whole"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").write_text("{}")
    save_file({"m.weight": torch.zeros(32, 32).bfloat16()}, tmp_path / "base" / "model.safetensors")
    save_file({"m.weight": weight}, tmp_path / "whole" / "model.safetensors")
    saved = {"base_model.model.m.modules_to_save.weight": weight}
    save_file(saved, tmp_path / "adapter" / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": ["m"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    ckptconv.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "codes", quantize="fp8-block", fsync=False)
    ckptconv.convert(tmp_path / "whole", tmp_path / "again", quantize="fp8-block", fsync=False)
    codes, again = (load_file(tmp_path / each / "model.safetensors") for each in ("codes", "again"))
    for name in parts_of("m.weight"):
        assert torch.equal(codes[name].view(torch.uint8), again[name].view(torch.uint8))
