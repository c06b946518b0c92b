"""compressed-tensors quantizes new weights by their largest numbers: ours are compared with what it reads of them, and
what we quantize with what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import configured, dequantized, differing, read, verified

NEEDED = ("torch", "compressed_tensors")
_CASES: dict[str, dict[str, Any]] = {
    "pack-quantized 4 bits": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int-quantized 3 bits": {"num_bits": 3, "type": "int", "strategy": "channel", "symmetric": False},
    "pack-quantized 3 bits": {"num_bits": 3, "type": "int", "strategy": "channel", "symmetric": False},
    "int-quantized 5 bits": {"num_bits": 5, "type": "int", "strategy": "group", "group_size": 64},
    "int-quantized 8 bits": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "mxfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    },
    "mxfp6-pack-quantized": {
        "num_bits": 6,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    },
    "nvfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
}
_WAYS: dict[str, Any] = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import torch
    from safetensors.torch import save_file

    import ckptconv

    torch.manual_seed(seed)
    for case, words in _CASES.items():
        format_ = case.split()[0]
        here = place / case.replace(" ", "-")
        here.mkdir()
        weights = {f"a.{name}": torch.randn(48, 256).bfloat16() * 0.3 for name in ("q_proj", "up_proj")}
        weights["a.up_proj"][7:9] = 0
        tensors: dict[str, torch.Tensor] = {}
        wanted = {}
        for name, weight in weights.items():
            parts, again, scheme = compressed(weight, format_, {"symmetric": True, "dynamic": False, **words})
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            wanted[f"{name}.weight"] = ([48, 256], raw(again.bfloat16()))
        save_file(tensors, here / "model.safetensors")
        said = {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": scheme}}
        configured(here, said)
        yield case, dequantized(here, wanted)
        if format_ in _WAYS:
            plain, out = here / "weights.safetensors", here / "codes.safetensors"
            save_file({f"{name}.weight": weight for name, weight in weights.items()}, plain)
            ckptconv.convert(plain, out, quantize=_WAYS[format_], **verified())
            yield f"{case}, written", differing(read(out), read(here / "model.safetensors"))


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor of torch."""
    import torch

    data: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


def compressed(weight: Any, format_: str, words: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Return the parts of a weight, with scales by least and largest numbers, the weight again, and its words."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**words)
    # Scales of floats of four bits are made of float32.
    exact = weight.float() if args.scale_dtype else weight
    groups = exact.unflatten(1, (-1, args.group_size or weight.shape[1]))
    least, most = groups.amin(-1), groups.amax(-1)
    state = {"weight": weight}
    whole = None
    if args.strategy == "tensor_group":
        whole = state["weight_global_scale"] = generate_gparam(exact.min(), exact.max()).reshape(1)
    scale, zero = calculate_qparams(least, most, args, global_scale=whole)
    state |= {"weight_scale": scale if args.scale_dtype else scale.to(weight.dtype), "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format_)
    compressor = BaseCompressor.get_value_from_registry(format_)
    parts = compressor.compress({name: each for name, each in state.items() if isinstance(each, torch.Tensor)}, scheme)
    return parts, compressor.decompress(dict(parts), scheme)["weight"], scheme.model_dump(mode="json")
