"""Model Optimizer quantizes a new model in several ways: our weights are compared with those that it computes with, and
what we quantize to NVFP4 with what it writes.

Its exporter rounds anew: few numbers that are between two codes become the other of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import differing, read

NEEDED = ("torch", "transformers", "modelopt")
_CONFIGURATIONS = (
    "INT4_AWQ_CFG",
    "INT8_SMOOTHQUANT_CFG",
    "INT8_WEIGHT_ONLY_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
)
# Modules whose input is of no norm: what that is multiplied by is not moved into one.
_CHECKED = ("o_proj", "down_proj")
# How many numbers may be further apart than what float32 rounds.
_FEW = 0.002


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    for name in _CONFIGURATIONS:
        yield name, _read(place / name, name, seed)
    yield "W4A16_NVFP4_CFG, written", _written(place / "written", seed)


def _model(seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sides = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sides, **heads, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    return LlamaForCausalLM(config).bfloat16().eval()


def _exported(model: Any, words: Any, place: Path) -> Any:
    """Quantize a model, write it, and return it as it was before that."""
    import copy

    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    data = torch.randint(0, 64, (2, 16))
    quantized = mtq.quantize(model, words, forward_loop=lambda its: its(data))
    before = copy.deepcopy(quantized)
    export_hf_checkpoint(quantized, dtype=torch.bfloat16, export_dir=str(place))
    return before


def _read(place: Path, name: str, seed: int) -> str:
    import modelopt.torch.quantization as mtq
    import torch

    import ckptconv

    before = _exported(_model(seed), getattr(mtq, name), place)
    options: dict[str, Any] = {"dequantize": True, "dtype": "float32", "verify": True}
    ckptconv.convert(place, place / "plain", **options)
    made = read(place / "plain" / "model.safetensors")
    for module, layer in before.named_modules():
        if module.endswith(_CHECKED):
            smoothing = getattr(layer.input_quantizer, "_pre_quant_scale", torch.ones(1)).float()
            wanted = layer.weight_quantizer(layer.weight.float()).float() * smoothing
            shape, data = made[f"{module}.weight"]
            found = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
            apart = ((found - wanted).abs() > 1e-6 * wanted.abs().max()).double().mean()
            if not apart <= _FEW:
                return f"{module} differs in {apart:.2%} of its numbers"
    return "" if len(made) == len(list(before.parameters())) else "there are other tensors"


def _written(place: Path, seed: int) -> str:
    import modelopt.torch.quantization as mtq

    import ckptconv

    model = _model(seed)
    model.save_pretrained(place / "source")
    _exported(model, mtq.W4A16_NVFP4_CFG, place / "codes")
    options: dict[str, Any] = {"quantize": "nvfp4-modelopt", "verify": True}
    ckptconv.convert(place / "source", place / "ours", **options)
    made, wanted = (read(place / name / "model.safetensors") for name in ("ours", "codes"))
    assert all(math.prod(shape) for shape, _ in wanted.values())
    return differing(made, wanted)
