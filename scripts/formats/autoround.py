"""AutoRound's own layers have random codes, scales and zero points: our weights are compared with theirs.

NVFP4 is divided by its scale of the whole weight in another order there: it is compared with compressed-tensors, whose
layout that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import configured, dequantized
from formats.compressed import raw

NEEDED = ("torch", "auto_round")
_PACKINGS = {
    "auto_round:auto_gptq": (2, 3, 4, 8),
    "auto_round": (2, 3, 4, 5, 6, 7, 8),
    "auto_round:gptqmodel": (2, 3, 4, 5, 6, 7, 8),
    "auto_round:auto_awq": (4,),
}
# Floats: their bits, AutoRound's word, and the size of groups.
_FLOATS = {"MXFP4": (4, "mx_fp", 32), "MXFP8": (8, "mx_fp", 32), "NVFP4": (4, "nv_fp", 16)}
_ROWS, _COLUMNS = 64, 96


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    for packing, widths in _PACKINGS.items():
        for bits in widths:
            for size in (32, -1):
                here = place / f"{packing.replace(':', '-')}-{bits}-{size}"
                here.mkdir()
                layer = _layer(packing, bits, size if size > 0 else _COLUMNS)
                tensors = {f"m.{name}": tensor.contiguous() for name, tensor in layer.state_dict().items()}
                save_file(tensors, here / "model.safetensors")
                words = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": size}
                configured(here, {**words, "sym": False, "data_type": "int"})
                # What a unit matrix gives is the weight, but for the sign of zeros: that of the scale.
                weight = layer(torch.eye(_COLUMNS).half()).T
                signs = layer.scales.repeat_interleave(size if size > 0 else _COLUMNS, 0).T
                weight = torch.where(weight == 0, torch.zeros(()).copysign(signs), weight).bfloat16()
                yield (
                    f"{packing}, {bits} bits by {size}",
                    dequantized(here, {"m.weight": ([*weight.shape], raw(weight))}),
                )

    for case, (bits, kind, size) in _FLOATS.items():
        here = place / case
        here.mkdir()
        parts, weight = _floats(case, bits)
        save_file({f"m.{name}": tensor.contiguous() for name, tensor in parts.items()}, here / "model.safetensors")
        words = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "sym": True}
        configured(here, {**words, "bits": bits, "group_size": size, "data_type": kind, "act_bits": bits})
        yield f"auto_round:llm_compressor, {case}", dequantized(here, {"m.weight": ([_ROWS, _COLUMNS], raw(weight))})


def _floats(case: str, bits: int) -> tuple[dict[str, Any], Any]:
    """Return the parts of a weight of random floats, and the weight."""
    import torch
    from auto_round.experimental.qmodules.mx import MXFP4QuantLinear, MXFP8QuantLinear
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    codes = torch.randint(0, 256, (_ROWS, _COLUMNS * bits // 8)).to(torch.uint8)
    if case == "NVFP4":
        scale = torch.rand(_ROWS, _COLUMNS // 16).to(torch.float8_e4m3fn)
        parts = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": torch.tensor([37.0])}
        args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        return parts, compressor.decompress(dict(parts), scheme)["weight"].bfloat16()
    kind, name = (MXFP4QuantLinear, "weight_packed") if bits == 4 else (MXFP8QuantLinear, "weight")
    if bits == 8:
        codes = (codes % 126).view(torch.float8_e4m3fn)
    layer = kind(_COLUMNS, _ROWS, None)
    parts = {name: codes, "weight_scale": torch.randint(100, 140, (_ROWS, _COLUMNS // 32)).to(torch.uint8)}
    layer.load_state_dict(parts)
    return parts, layer.dequant_weight_online().bfloat16()


def _layer(packing: str, bits: int, size: int) -> Any:
    """Return a layer with random codes, zero points and scales."""
    import torch

    if packing.endswith("awq"):
        from auto_round.export.export_to_awq.utils import WQLinear_GEMM as Layer

        layer = Layer(bits, size, _COLUMNS, _ROWS, False, "cpu")
    else:
        module = "qlinear_torch_zp" if packing.endswith("auto_gptq") else "qlinear_torch"
        layers = __import__(f"auto_round_extension.torch.{module}", fromlist=["QuantLinear"])
        layer = layers.QuantLinear(bits, size, _COLUMNS, _ROWS, False, g_idx=packing.endswith("gptqmodel"))
    for name, tensor in layer.named_buffers():
        if name in ("qweight", "qzeros"):
            tensor.copy_(torch.randint(-(1 << 31), 1 << 31, tensor.shape).to(torch.int32))
        elif name == "scales":
            tensor.copy_((torch.rand(tensor.shape) + 0.1) * torch.randn(tensor.shape).sign())
    return layer
