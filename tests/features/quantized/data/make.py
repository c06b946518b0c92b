"""Makes the cases of bitsandbytes and compressed-tensors that are named here, and what these libraries make of them.

Run with torch 2.13.0, bitsandbytes 0.50.2 and compressed-tensors 0.20.0, on a CPU: `python make.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

HERE = Path(__file__).parent


def written(case: str, tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], said: Any) -> None:
    (HERE / case).mkdir(exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, HERE / case / "model.safetensors")
    save_file({name: each.bfloat16() for name, each in expected.items()}, HERE / case / "expected.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    (HERE / case / "config.json").write_text(json.dumps({**config, "quantization_config": said}, indent=1))


def bitsandbytes(case: str, weights: dict[str, torch.Tensor], storage: torch.dtype) -> None:
    tensors, expected = {}, {}
    for name, weight in weights.items():
        options = {"quant_type": "nf4", "compress_statistics": True, "blocksize": 64, "quant_storage": storage}
        made = Params4bit(weight, requires_grad=False, **options).to("cpu")
        tensors[f"{name}.weight"] = made.data
        state = made.quant_state.as_dict(packed=True)
        tensors |= {f"{name}.weight.{part}": each for part, each in state.items()}
        expected[f"{name}.weight"] = dequantize_4bit(made.data, made.quant_state)
    said = {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
    written(case, tensors, expected, said)


def compressed(weight: torch.Tensor, format_: str, args: QuantizationArgs) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """The parts of a weight, with scales by least and largest numbers, the weight again, and its words."""
    groups = {"group": args.group_size, "channel": weight.shape[1], "tensor": weight.numel()}[args.strategy]
    rows = weight.reshape(1, -1) if args.strategy == "tensor" else weight.unflatten(1, (-1, groups))
    least, most = rows.amin(-1), rows.amax(-1)
    scale, zero = calculate_qparams(least, most, args)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format_)
    compressor = BaseCompressor.get_value_from_registry(format_)
    parts = compressor.compress(state, scheme)
    return parts, compressor.decompress(parts, scheme)["weight"], scheme.model_dump(mode="json")


def compressed_tensors(case: str, format_: str, **words: Any) -> None:
    weight = torch.randn(16, 128).bfloat16()
    weight[3] += 0.5
    parts, again, scheme = compressed(weight, format_, QuantizationArgs(type="int", dynamic=False, **words))
    said = {
        "config_groups": {"group_0": scheme},
        "format": format_,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }
    written(case, {f"m.{name}": each for name, each in parts.items()}, {"m.weight": again}, said)


def main() -> None:
    torch.manual_seed(4)
    one = torch.randn(1, 64)
    equal = {"zeros": torch.zeros(4, 64), "equal": one.repeat(4, 1), "one": one, "some": torch.randn(5, 64)}
    equal["some"][1:3] = 0
    bitsandbytes("bnb-nf4-equal", equal, torch.uint8)
    for storage in (torch.bfloat16, torch.float32):
        name = str(storage).removeprefix("torch.")
        bitsandbytes(f"bnb-nf4-in-{name}", {"m": torch.randn(6, 128)}, storage)
    compressed_tensors("ct-int4-group", "int-quantized", num_bits=4, strategy="group", group_size=32)
    compressed_tensors("ct-int3-asym", "int-quantized", num_bits=3, strategy="channel", symmetric=False)
    compressed_tensors("ct-pack-int4-tensor-asym", "pack-quantized", num_bits=4, strategy="tensor", symmetric=False)


if __name__ == "__main__":
    main()
