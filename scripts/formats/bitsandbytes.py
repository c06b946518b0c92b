"""bitsandbytes quantizes new weights to 8 bits; ours are compared with those that it makes of them again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import configured, dequantized
from formats.compressed import raw

NEEDED = ("torch", "bitsandbytes")


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import torch
    from bitsandbytes.functional import int8_vectorwise_dequant
    from bitsandbytes.nn import Linear8bitLt
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors: dict[str, Any] = {}
    wanted = {}
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        layer = Linear8bitLt(96, 48, bias=False, has_fp16_weights=False)
        layer.load_state_dict({"weight": (torch.randn(48, 96) * 0.1).to(dtype)})
        state = layer.to("cpu").state_dict()
        tensors |= {f"m.{number}.{name}": each.contiguous() for name, each in state.items()}
        again = int8_vectorwise_dequant(state["weight"], state["SCB"]).bfloat16()
        wanted[f"m.{number}.weight"] = ([48, 96], raw(again))
    save_file(tensors, place / "model.safetensors")
    configured(place, {"quant_method": "bitsandbytes", "load_in_8bit": True, "_load_in_8bit": True})
    yield "8 bits", dequantized(place, wanted)
