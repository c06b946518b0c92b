"""Makes the cases of bitsandbytes, compressed-tensors and Model Optimizer that are named here, and what these libraries
make of them; of low-rank parts, what the sum is in order.

Run with torch 2.13.0, transformers 5.23.0, bitsandbytes 0.50.2, compressed-tensors 0.20.0 and nvidia-modelopt 0.47.0,
on a CPU: `python make.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

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


def low_rank(case: str) -> None:
    """Two modules of a model whose weights have low-rank parts, which Model Optimizer writes."""
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization import NVFP4_SVDQUANT_DEFAULT_CFG, quantize, tensor_quant
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from transformers import LlamaConfig, LlamaForCausalLM

    # Its kernels for GPUs: the input is quantized so too, and nothing that is stored depends on that.
    tensor_quant.dynamic_block_quantize_op = lambda inputs, *_: inputs
    sides = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 16}
    more = {"num_attention_heads": 2, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}
    model = LlamaForCausalLM(LlamaConfig(**sides, **more)).bfloat16()
    words = {**NVFP4_SVDQUANT_DEFAULT_CFG, "algorithm": {"method": "svdquant", "lowrank": 4}}
    quantized = quantize(model, words, forward_loop=lambda its: its(torch.arange(16)[None]))
    with TemporaryDirectory() as place:
        export_hf_checkpoint(quantized, dtype=torch.bfloat16, export_dir=place)
        tensors = load_file(f"{place}/model.safetensors")
        said = json.loads(Path(place, "config.json").read_text())["quantization_config"]
    modules = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
    expected = {}
    for module in modules:
        parts = {name.removeprefix(f"{module}."): each for name, each in tensors.items() if name.startswith(module)}
        shape = parts["weight"].shape[0], 2 * parts["weight"].shape[1]
        known = {"dtype": torch.float32, "block_sizes": {-1: 16}, "scale": parts["weight_scale"]}
        codes = NVFP4QTensor(shape, torch.float32, parts["weight"]).dequantize(
            **known, double_scale=parts["weight_scale_2"]
        )
        smoothing = parts["pre_quant_scale"].float()
        total = torch.zeros(shape, dtype=torch.float64)
        b, a = (parts[f"weight_quantizer._svdquant_lora_{factor}"].double() for factor in "ba")
        for left, right in zip(b.T, a * smoothing.double(), strict=True):
            total = total + left[:, None] * right
        # Rounded once: torch would round to float32 first.
        exact = ((codes * smoothing).double() + total).numpy()
        last = np.frexp(exact)[1] - 8
        expected[f"{module}.weight"] = torch.from_numpy(np.ldexp(np.rint(np.ldexp(exact, -last)), last))
    kept = {name: each for name, each in tensors.items() if name.startswith((*modules, "model.norm"))}
    expected["model.norm.weight"] = tensors["model.norm.weight"]
    written(case, kept, expected, said)


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
    low_rank("modelopt-nvfp4-svd")


if __name__ == "__main__":
    main()
