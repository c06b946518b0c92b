"""Model Optimizer quantizes a new model in several ways: our weights are compared, bit for bit, with what it makes of
the codes that it stored, and what we quantize to NVFP4 with what it writes.

A low-rank part is added as our page says: that is computed anew here, and what `fold_weight` adds is as near as its own
roundings let it be. The codes are also compared with those that it computes with. Its exporter divides by the scale,
where its quantizers multiply by the reciprocal: few numbers that are between two codes become the other of them. Of FP8
with one scale for a weight these are more, as it divides in bfloat16.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats import differing, read, verified

NEEDED = ("torch", "transformers", "modelopt")
_CONFIGURATIONS = (
    "INT4_AWQ_CFG",
    "W4A8_AWQ_BETA_CFG",
    "INT8_SMOOTHQUANT_CFG",
    "INT8_WEIGHT_ONLY_CFG",
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "MXFP8_DEFAULT_CFG",
    "MXFP4_DEFAULT_CFG",
    "W4A8_MXFP4_FP8_CFG",
    "NVFP4_DEFAULT_CFG",
    "NVFP4_AWQ_LITE_CFG",
    "NVFP4_MLP_WEIGHT_ONLY_CFG",
    "W4A8_NVFP4_FP8_CFG",
)
# Modules whose input is of no norm: what that is multiplied by is not moved into one.
_CHECKED = ("o_proj", "down_proj")
# How many numbers may be further apart than what float32 rounds. Of the second algorithm, the exporter's scales are
# others than the quantizer's.
_FEW = {"FP8": 0.05, "W4A8_NVFP4_FP8": 1.0}
_FEW_OF_OTHERS = 0.002


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    _stand_in()
    for name in _CONFIGURATIONS:
        yield name, _read(place / name, name, seed)
    for dtype in ("bfloat16", "float32"):
        yield f"NVFP4_SVDQUANT_DEFAULT_CFG of {dtype}", _low_rank(place / f"low-rank-{dtype}", dtype, seed)
    yield "W4A16_NVFP4_CFG, written", _written(place / "written", seed)


def _stand_in() -> None:
    """Have blocks quantized by the tensors of Model Optimizer that its exporter makes, not by its kernels for GPUs."""
    from modelopt.torch.quantization import tensor_quant
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    def quantized(inputs: Any, size: int, amax: Any, bits: int, _: int, __: int, exponent_bits: int) -> Any:
        words: dict[str, Any] = {"dtype": inputs.dtype, "block_sizes": {-1: size}}
        if exponent_bits == 8:
            codes, scale = MXFP4QTensor.quantize(inputs, size) if bits == 4 else MXFP8QTensor.quantize(inputs)
            return codes.dequantize(scale=scale, **words).reshape(inputs.shape)
        whole = amax.amax().float() / (6 * 448)
        codes, scale, _ = NVFP4QTensor.quantize(inputs, size, None, whole)
        return codes.dequantize(scale=scale, double_scale=whole, **words).reshape(inputs.shape)

    tensor_quant.dynamic_block_quantize_op = quantized


def _model(seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sides = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sides, **heads, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    return LlamaForCausalLM(config).bfloat16().eval()


def _exported(model: Any, words: Any, place: Path) -> Any:
    """Quantize a model, write it in its dtype, and return it as it was before that."""
    import copy

    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    data = torch.randint(0, 64, (2, 16))
    quantized = mtq.quantize(model, words, forward_loop=lambda its: its(data))
    before = copy.deepcopy(quantized)
    export_hf_checkpoint(quantized, dtype=model.dtype, export_dir=str(place))
    return before


def _read(place: Path, name: str, seed: int) -> str:
    import modelopt.torch.quantization as mtq
    import torch
    from safetensors.torch import load_file

    import ckptconv

    before = _exported(_model(seed), getattr(mtq, name), place)
    options: dict[str, Any] = {"dequantize": True, "dtype": "float32", **verified()}
    ckptconv.convert(place, place / "plain", **options)
    made, stored = read(place / "plain" / "model.safetensors"), load_file(place / "model.safetensors")
    words = json.loads((place / "hf_quant_config.json").read_text())["quantization"]
    seen = 0
    for module, layer in before.named_modules():
        parts = {part: stored.get(f"{module}.{part}") for part in ("weight", "weight_scale", "weight_scale_2")}
        if parts["weight_scale"] is None:
            continue
        seen += 1
        smoothing = stored.get(f"{module}.pre_quant_scale", torch.ones(1)).float()
        is_moved = len(smoothing) == 1 and hasattr(layer.input_quantizer, "_pre_quant_scale")
        weight = _stored(parts, layer.weight.shape, words) * smoothing
        shape, data = made[f"{module}.weight"]
        # What is -0 to us is 0 to its reader of NVFP4.
        if not torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape), weight):
            return f"{module} is not what is stored"
        if module.endswith(_CHECKED) and not is_moved:
            first = layer.weight_quantizer[0] if words["quant_algo"] == "W4A8_AWQ" else layer.weight_quantizer
            wanted = first(layer.weight.float()).float() * smoothing
            apart = ((weight - wanted).abs() > 1e-6 * wanted.abs().max()).double().mean()
            if not apart <= _FEW.get(words["quant_algo"], _FEW_OF_OTHERS):
                return f"{module} differs in {apart:.2%} of its numbers"
    if not seen:
        return "nothing is quantized"
    return "" if len(made) == len(list(before.parameters())) else "there are other tensors"


def _stored(parts: Mapping[str, Any], shape: Any, words: Mapping[str, Any]) -> Any:
    """Return what Model Optimizer's tensors make of codes and scales."""
    import torch
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    codes, scale, whole = parts["weight"], parts["weight_scale"], parts["weight_scale_2"]
    algorithm, size = words["quant_algo"], words.get("group_size", 32)
    known = {"dtype": torch.float32, "block_sizes": {-1: size}, "scale": scale}
    if "NVFP4" in algorithm:
        return NVFP4QTensor(shape, torch.float32, codes).dequantize(**known, double_scale=whole)
    if "mxfp4" in algorithm.lower():
        return MXFP4QTensor(shape, torch.float32, codes).dequantize(**known).reshape(shape)
    if algorithm == "MXFP8":
        return MXFP8QTensor(shape, torch.float32, codes).dequantize(**known)
    if algorithm == "fp8_pb_wo":
        sides = {-1: 128, -2: 128}
        known |= {"block_sizes": sides, "scale": scale.squeeze(3).squeeze(1)}
        return FP8QTensor(shape, torch.float32, codes).dequantize(**known)
    if codes.dtype == torch.uint8:
        # Its own reader of these runs on GPUs alone: the low half of a byte is of the first of two rows.
        halves = torch.stack([codes << 4, codes], 1).reshape(shape).view(torch.int8) >> 4
        return halves.float() * scale.repeat_interleave(size, 1)
    return codes.float() * (scale[:, None] if scale.dim() else scale)


def _low_rank(place: Path, dtype: str, seed: int) -> str:
    """Return what differs in weights with a low-rank part, of a model of this dtype."""
    import modelopt.torch.quantization as mtq
    import numpy as np
    import torch
    from safetensors.torch import load_file

    import ckptconv

    model = _model(seed).to(getattr(torch, dtype))
    before = _exported(model, mtq.NVFP4_SVDQUANT_DEFAULT_CFG, place)
    stored = load_file(place / "model.safetensors")
    made = {}
    for into in ("float32", "bfloat16"):
        ckptconv.convert(place, place / into, dequantize=True, dtype=into, **verified())
        made[into] = load_file(place / into / "model.safetensors")
    words = json.loads((place / "hf_quant_config.json").read_text())["quantization"]
    modules = {name: layer for name, layer in before.named_modules() if f"{name}.weight_scale" in stored}
    for module, layer in modules.items():
        parts = {part: stored[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")}
        smoothing = stored.get(f"{module}.pre_quant_scale", torch.ones(layer.weight.shape[1])).float()
        codes = (_stored(parts, layer.weight.shape, words) * smoothing).double().numpy()
        b, a = (stored[f"{module}.weight_quantizer._svdquant_lora_{factor}"].double().numpy() for factor in "ba")
        smooth = smoothing.double().numpy()
        total, size = np.zeros(codes.shape), np.zeros(codes.shape)
        for at in range(len(a)):
            total = total + b[:, at : at + 1] * (a[at] * smooth)
            size += np.abs(b[:, at : at + 1] * (a[at] * smooth))
        exact = codes + total
        for into, digits in (("float32", 24), ("bfloat16", 8)):
            # Rounded once, by halves of the last of so many digits: to nearest, ties to even.
            last = np.maximum(np.frexp(exact)[1] - digits, -126 - digits + 1)
            if not np.array_equal(
                made[into][f"{module}.weight"].double().numpy(), np.ldexp(np.rint(np.ldexp(exact, -last)), last)
            ):
                return f"{module} in {into} is not the sum in order"
        if module.endswith(_CHECKED) and f"{module}.pre_quant_scale" in stored:
            layer.fold_weight()
            # What is folded was not smoothed. It is rounded as codes, as product, and as sum; a product's own sums are
            # in float32.
            unit = 2.0 ** -{"bfloat16": 8, "float32": 24}[dtype]
            bound = (2 * unit * (1 + unit) + (len(a) + 4) * 2.0**-24) * (np.abs(codes) + size)
            apart = np.abs(layer.weight.detach().double().numpy() * smooth - exact) > bound
            if not apart.mean() <= _FEW_OF_OTHERS:
                return f"{module} is folded to something else: {apart.mean():.2%} of its numbers"
    return "" if modules else "nothing is quantized"


def _written(place: Path, seed: int) -> str:
    import modelopt.torch.quantization as mtq

    import ckptconv

    model = _model(seed)
    model.save_pretrained(place / "source")
    _exported(model, mtq.W4A16_NVFP4_CFG, place / "codes")
    options: dict[str, Any] = {"quantize": "nvfp4-modelopt", **verified()}
    ckptconv.convert(place / "source", place / "ours", **options)
    made, wanted = (read(place / name / "model.safetensors") for name in ("ours", "codes"))
    assert all(math.prod(shape) for shape, _ in wanted.values())
    return differing(made, wanted)
