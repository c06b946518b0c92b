"""What is computed is rounded once, to the dtype that is wanted last: a weight of every dialect, on every way.

A weight is its product in float32. Where its program computes in the dtype of the scales, as for GPTQ, AWQ and the
integers of compressed-tensors, a weight of another dtype of 16 bits is that product rounded to the one of the scales.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dialects import CASES, MADE_CODES, QUANTIZED, Array, nearest, numbers, products
from effort import every
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Narrow, Picked, Stored, Tagged, TensorFacts, View
from ckptconv.tensors.moves import File


def adapter_of(name: str, shape: tuple[int, ...], place: Path) -> tuple[Path, Array]:
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
def test_a_weight_of_every_dialect_is_rounded_once_on_every_way(case: str, tmp_path: Path) -> None:
    exact = products(case, tmp_path)
    expected = load_file(QUANTIZED / case / "expected.safetensors")
    source = QUANTIZED / case
    ckptconv.convert(source, tmp_path / "half", dequantize=True, dtype="fp16", fsync=False)
    half = load_file(tmp_path / "half" / "model.safetensors")
    with ckptconv.open(source, dequantize=True) as opened:
        for name, product in exact.items():
            if not product.is_floating_point():
                continue
            assert torch.equal(opened[name].to("float32").torch(), product), name
            assert torch.equal(opened[name].to("float16").torch(), half[name]), name
            assert torch.equal(opened[name].to("bf16").torch(), expected[name].bfloat16()), name
    matrices = [name for name in exact if name.endswith("_proj.weight") or name == "m.weight"]
    for number, name in enumerate(matrices[:1]):
        adapter, more = adapter_of(name, tuple(exact[name].shape), tmp_path / f"adapter{number}")
        ckptconv.merge(source, adapter, tmp_path / "merged", dequantize=True, verify=True, fsync=False)
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


@every("case", MADE_CODES)
def test_codes_are_made_of_the_product(case: str, tmp_path: Path) -> None:
    products(case, tmp_path)
    ckptconv.convert(QUANTIZED / case, tmp_path / "codes", dequantize=True, quantize="fp8-block", fsync=False)
    ckptconv.convert(tmp_path / "products", tmp_path / "again", quantize="fp8-block", fsync=False)
    codes, again = (load_file(tmp_path / each / "model.safetensors") for each in ("codes", "again"))
    quantized = [name for name in again if name.endswith("_scale_inv")]
    assert quantized
    for scale in quantized:
        for name in (scale, scale.removesuffix("_scale_inv")):
            assert torch.equal(codes[name].view(torch.uint8), again[name].view(torch.uint8)), name


def test_a_cast_goes_through_views_to_what_was_computed() -> None:
    wide, narrow = DTYPES["float64"], DTYPES["bfloat16"]
    inner = Stored(File("f", 1 << 20), 0, wide, (4, 6), (6, 1))
    stored = Stored(File("f", 1 << 20), 0, narrow, (4, 6), (6, 1))
    made = casting.rounded(inner, narrow)
    mixed = Concat((made, stored))
    for view, shown in (
        (made, inner),
        (View(made, narrow, (24,)), View(inner, wide, (24,))),
        (Narrow(made, 0, 1, 2), Narrow(inner, 0, 1, 2)),
        (Picked(made, 1, (6, 4), (1, 6)), Picked(inner, 1, (6, 4), (1, 6))),
        (Tagged(made, TensorFacts()), Tagged(inner, TensorFacts())),
        (Concat((View(made, narrow, (6, 4)), View(made, narrow, (6, 4)))), Concat((View(inner, wide, (6, 4)),) * 2)),
        (mixed, Concat((inner, casting.cast(stored, wide)))),
    ):
        assert casting.unrounded(view) == shown
        assert casting.cast(view, wide) == shown
        again = casting.cast(casting.cast(view, DTYPES["float16"]), wide)
        assert again == shown or view is mixed  # what is stored is what it is cast to
        assert casting.cast(view, narrow) is view
    # Bits that are seen as others are what they are.
    bits = View(made, DTYPES["uint16"], (4, 6))
    assert casting.unrounded(bits) == bits
    # So are elements that a file holds.
    assert casting.unrounded(casting.cast(inner, narrow)).dtype == narrow


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


def test_a_virtual_checkpoint_is_read_as_the_files_that_it_describes(tmp_path: Path) -> None:
    source = QUANTIZED / "bnb-nf4-in-bfloat16"
    ckptconv.convert(source, tmp_path / "m.virtual.json", dequantize=True, fsync=False)
    ckptconv.convert(tmp_path / "m.virtual.json", tmp_path / "wide", dtype="fp32", fsync=False)
    expected = load_file(source / "expected.safetensors")["m.weight"].float()
    assert torch.equal(load_file(tmp_path / "wide" / "model.safetensors")["m.weight"], expected)
