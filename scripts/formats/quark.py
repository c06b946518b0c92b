"""AMD Quark quantizes a new model in each of its ways: our weights are compared with those that it computes with when
it has read its files again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import dequantized
from formats.compressed import raw

NEEDED = ("torch", "transformers", "quark")
# It compiles a function of few elements otherwise, which takes minutes.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# The classes that say how weights are quantized, and what they are given.
_STATIC = {"is_dynamic": False}
_ROWS = {"ch_axis": 0, **_STATIC}
_BLOCKS = {"ch_axis": -1, **_STATIC}
_INTEGERS = {"scale_type": "float", "round_method": "half_even"}
_GROUPS = {"group_size": 32, **_BLOCKS, **_INTEGERS}
_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "FP8 by tensor": ("FP8E4M3PerTensorSpec", {"observer_method": "min_max", **_STATIC}),
    "FP8 by row": ("FP8E4M3PerChannelSpec", _ROWS),
    "int8 by row": ("Int8PerChannelSpec", {**_ROWS, **_INTEGERS, "symmetric": True}),
    "uint4": ("Uint4PerGroupSpec", {**_GROUPS, "symmetric": False}),
    "int4": ("Int4PerGroupSpec", {**_GROUPS, "symmetric": True}),
    "MXFP4": ("OCP_MXFP4Spec", _BLOCKS),
    "MXFP6 e2m3": ("OCP_MXFP6E2M3Spec", _BLOCKS),
    "MXFP6 e3m2": ("OCP_MXFP6E3M2Spec", _BLOCKS),
    "NVFP4": ("FP4PerGroupSpec", {"group_size": 16, **_BLOCKS}),
}
_ALGORITHMS = {"awq": "AWQConfig", "gptq": "GPTQConfig", "smooth": "SmoothQuantConfig"}
_REFUSED = "online rotation"


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    for case in _SPECS:
        for order in ("reorder", "order") if "int4" in case else ("reorder",):
            yield f"{case}, {order}", _read(place / case / order, seed, case, pack_method=order)
    for algorithm in _ALGORITHMS:
        yield f"uint4, {algorithm}", _read(place / algorithm, seed, "uint4", algorithm)
    why = _read(place / _REFUSED, seed, "uint4", _REFUSED)
    yield f"uint4, {_REFUSED}, refused", "" if "online_r1_rotation" in why else f"not refused: {why}"
    for case, mode in (("uint4", "awq"), ("int4", "awq"), ("FP8 by tensor", "fp8")):
        algorithm = "awq" if mode == "awq" else ""
        yield f"{case}, as {mode}", _read(place / f"{case} as {mode}", seed, case, algorithm, custom_mode=mode)


def _read(place: Path, seed: int, case: str, algorithm: str = "", **export: Any) -> str:
    import torch
    from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
    from quark.torch.quantization.config import config as words
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    import ckptconv

    torch.manual_seed(seed)
    sides = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    config = LlamaConfig(**sides, **heads, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(config).bfloat16().eval()
    class_, given = _SPECS[case]
    spec = getattr(words, class_)(**given)
    if case == "NVFP4":
        spec = words.ScaleQuantSpec(spec, words.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False))
    spec = spec.to_quantization_spec()
    algorithms = [_algorithm(algorithm)] if algorithm else None
    asked = words.QConfig(words.QLayerConfig(weight=spec), exclude=["lm_head"], algo_config=algorithms)
    quantizer = ModelQuantizer(asked)
    data: Any = [{"input_ids": torch.randint(0, 64, (1, 32))} for _ in range(2)]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=None)
    quantized = quantizer.freeze(quantizer.quantize_model(model, loader))
    place.mkdir(parents=True)
    with torch.no_grad():
        export_safetensors(quantized, str(place), **export)
        again = import_model_from_safetensors(LlamaForCausalLM(config).bfloat16(), str(place))
    if export.get("custom_mode") == "awq":
        # With transformers from 5.6 on, it gives plain weights the names of codes.
        tensors = load_file(place / "model.safetensors")
        names = {name: name.replace(".qweight", ".weight") for name in tensors if tensors[name].is_floating_point()}
        save_file({names.get(name, name): tensor for name, tensor in tensors.items()}, place / "model.safetensors")
    wanted = {name: ([*tensor.shape], raw(tensor)) for name, tensor in again.state_dict().items() if "norm" in name}
    for name, module in again.named_modules():
        if hasattr(module, "_get_qweight"):
            weight = module._get_qweight(module.weight).bfloat16()
        elif name in ("lm_head", "model.embed_tokens"):
            weight = module.weight
        else:
            continue
        wanted[f"{name}.weight"] = ([*weight.shape], raw(weight))
    try:
        return dequantized(place, wanted)
    except ckptconv.UnsupportedError as error:
        return str(error)


def _algorithm(name: str) -> Any:
    from quark.torch.quantization.config import config as words

    if name == _REFUSED:
        targets = {"target_modules": [f"model.layers.layer_id.self_attn.{side}_proj" for side in "qkv"]}
        layers = {"first_layer": [targets], "middle_layers": [targets], "last_layer": [{"target_modules": []}]}
        return words.RotationConfig(scaling_layers=layers, online_r1_rotation=True, rotation_size=32)
    attention = {"layers": [f"self_attn.{side}_proj" for side in "qkv"], "inp": "self_attn.q_proj"}
    scaling = {"prev_op": "input_layernorm", **attention, "module2inspect": "self_attn"}
    if name == "gptq":
        inside = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
        return words.GPTQConfig(inside_layer_modules=inside, model_decoder_layers="model.layers")
    return getattr(words, _ALGORITHMS[name])(scaling_layers=[scaling], model_decoder_layers="model.layers")
