"""HQQ quantizes new layers along either axis; our weights are compared with those that it computes with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import configured, dequantized
from formats.compressed import raw

NEEDED = ("torch", "hqq")


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import torch
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for axis in (0, 1):
            here = place / f"{str(dtype)[6:]}-axis-{axis}"
            here.mkdir()
            tensors: dict[str, Any] = {}
            wanted = {}
            for bits in (8, 4, 3, 2, 1):
                linear = torch.nn.Linear(96, 80).to(dtype)
                words = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
                layer = HQQLinear(linear, words, compute_dtype=dtype, device="cpu")
                tensors |= {f"m.{bits}.{name}": each.contiguous() for name, each in layer.state_dict().items()}
                wanted[f"m.{bits}.weight"] = ([80, 96], raw(layer.dequantize().bfloat16()))
                wanted[f"m.{bits}.bias"] = ([80], raw(tensors[f"m.{bits}.bias"]))
            save_file(tensors, here / "model.safetensors")
            configured(here, {"quant_method": "hqq", "quant_config": {"weight_quant_params": {}}, "skip_modules": []})
            yield f"{str(dtype)[6:]}, axis {axis}", dequantized(here, wanted)
