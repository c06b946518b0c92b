"""compressed-tensors rotates tiny models of transformers, and quantizes them: a plain model with the weights that we
make of each has the logits of the rotated one, but for the rounding of float32.

Hadamard matrices, random ones and others, of inputs and outputs, whole and in blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import verified

NEEDED = ("torch", "compressed_tensors", "transformers")
# The kind of matrix, the size of blocks or None, and which rotations there are: of all inputs and outputs (QuIP), or of
# the input of down_proj (R4 of SpinQuant).
CASES: dict[str, tuple[str, int | None, bool]] = {
    "QuIP": ("hadamard", None, True),
    "QuIP in blocks": ("hadamard", 32, True),
    "QuIP in random blocks": ("random-hadamard", 32, True),
    "QuIP at random": ("random-hadamard", None, True),
    "R4 at random": ("random-hadamard", None, False),
    "R4 by any matrix": ("random-matrix", None, False),
}
# What the sums of float32 may differ by, in logits of some units; the inverse of any matrix has larger numbers.
_CLOSE = {"random-matrix": 1e-3}
_DOWN, _HEAD = "re:.*down_proj$", "lm_head"


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    for case, (kind, side, is_quip) in CASES.items():
        for quantized in (True, False) if not is_quip else (True,):
            torch.manual_seed(seed)
            here = place / f"{case} {'in codes' if quantized else 'plain'}".replace(" ", "-")
            tokens = torch.arange(3, 43).view(2, 20)
            logits = _rotated(here, _schemes(kind, side, is_quip), tokens, quantized=quantized)
            why = _compared(here, logits, tokens, _CLOSE.get(kind, 2e-5))
            yield f"{case}, {'in codes' if quantized else 'plain'}", why


def _schemes(kind: str, side: int | None, is_quip: bool) -> dict[str, Any]:
    from compressed_tensors.transform import TransformArgs, TransformScheme

    def scheme(targets: str, *places: str) -> Any:
        first, second = (
            TransformArgs(targets=[targets], location=place, inverse=bool(at), ignore=[_HEAD])
            for at, place in enumerate(places)
        )
        return TransformScheme(type=kind, head_dim=side, apply=[first, second])

    if not is_quip:
        return {"R4": scheme(_DOWN, "input", "weight_input")}
    return {"v": scheme("Linear", "input", "weight_input"), "u": scheme("Linear", "weight_output", "output")}


def _rotated(here: Path, schemes: dict[str, Any], tokens: Any, *, quantized: bool) -> Any:
    """Save a model that rotates, and return its logits in float32."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sides = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    if any(scheme.type == "hadamard" for scheme in schemes.values()):
        sides["intermediate_size"] = 128
    model = Qwen2ForCausalLM(Qwen2Config(**sides, **heads)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
        parameter.data = (parameter.data * 5).bfloat16() if parameter.dim() == 2 else parameter.data.bfloat16()
    apply_transform_config(model, TransformConfig(config_groups=schemes))
    if quantized:
        words = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
        # Where all linear modules rotate, codes of all are compared as they are; else only those that do.
        targets = {"targets": ["Linear"]} if "v" in schemes else {"targets": [_DOWN]}
        scheme = QuantizationScheme(**targets, weights=words)
        said = {"ignore": [_HEAD], "format": "pack-quantized", "quantization_status": "frozen"}
        apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, **said))
        for module in model.modules():
            if getattr(module, "quantization_scheme", None):
                groups = module.weight.unflatten(1, (-1, 32))
                scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), words)
                module.weight_scale.data = scale.to(module.weight.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    if quantized:
        compressor.compress_model(model)
    model.save_pretrained(here)
    compressor.update_config(here)
    with torch.no_grad():
        model(tokens)  # makes weights of the codes
        return model.float()(tokens).logits


def _compared(here: Path, logits: Any, tokens: Any, most: float) -> str:
    """Return how a plain model with our weights differs; "" if it does not."""
    import torch
    from transformers import AutoModelForCausalLM

    import ckptconv

    out = here.with_name(f"{here.name}-plain-model")
    ckptconv.convert(here, out, dequantize=True, dtype="fp32", fsync=False, **verified())
    if "quantization_config" in json.loads((out / "config.json").read_text()):
        return "its configuration tells of rotations"
    model, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    wrong = {name: sorted(map(str, each)) for name, each in found.items() if each}
    with torch.no_grad():
        distance = (model.eval()(tokens).logits - logits).abs().max().item()
    return f"{wrong}" if wrong else "" if distance < most else f"logits differ by {distance}"
