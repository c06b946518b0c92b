"""Quantized weights of an opened checkpoint, and of a state dict that is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from effort import every
from features.quantized.dialects import CASES, QUANTIZED, products
from features.quantized.test_quantized import bits, codes
from safetensors.torch import load_file

import ckptconv


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


@every("case", CASES)
def test_an_opened_checkpoint_has_the_same_weights_and_slices(case: str) -> None:
    expected = load_file(QUANTIZED / case / "expected.safetensors")
    with ckptconv.open(QUANTIZED / case, dequantize=True) as opened:
        for name, tensor in expected.items():
            cut = tuple(slice(extent // 3, extent - extent // 4) for extent in tensor.shape)
            assert bits({"": opened[name][cut]}) == bits({"": tensor[cut]})


def test_state_dicts_of_torch_are_loaded_with_their_weights(tmp_path: Path) -> None:
    tied, scale = codes(40, 30), torch.tensor(0.5)
    state = {f"{name}.weight{part}": each for name in "ab" for part, each in (("", tied), ("_scale", scale))}
    torch.save({"model": state, "step": 7}, tmp_path / "x.pt")
    loaded = ckptconv.load_state_dict(tmp_path / "x.pt", dequantize=True)
    assert loaded["step"] == 7
    made = loaded["model"]
    assert made["a.weight"].data_ptr() == made["b.weight"].data_ptr()
    assert bits({"": made["b.weight"]}) == bits({"": (tied.float() * 0.5).bfloat16()})
