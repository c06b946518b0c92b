"""MLX quantizes new arrays in each of its modes; our weights are compared with what it makes of them itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import configured, dequantized

NEEDED = ("mlx",)
_AFFINE = [(bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)]
_FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    mx.random.seed(seed)
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        for bits, size in _AFFINE:
            name = f"affine {bits} bits by {size}, {str(dtype).rpartition('.')[2]}"
            yield name, _checked(place / name.replace(" ", "-"), dtype, bits, size, "affine")
    for mode, (bits, size) in _FIXED.items():
        yield mode, _checked(place / mode, mx.bfloat16, bits, size, mode)


def _checked(place: Path, dtype: Any, bits: int, size: int, mode: str) -> str:
    """Quantize a matrix and stacked ones, and return what differs."""
    import mlx.core as mx
    import numpy as np

    place.mkdir()
    tensors: dict[str, Any] = {}
    wanted = {}
    for name, shape in (("a.q_proj", (24, 256)), ("a.switch_mlp.up_proj", (3, 16, 128))):
        weight = mx.random.normal(shape).astype(dtype) * 0.2
        codes, scales, *biases = mx.quantize(weight, group_size=size, bits=bits, mode=mode)
        tensors |= {f"{name}.weight": codes, f"{name}.scales": scales}
        tensors |= {f"{name}.biases": each for each in biases}
        again = mx.dequantize(codes, scales, *biases, group_size=size, bits=bits, mode=mode).astype(mx.bfloat16)
        wanted[f"{name}.weight"] = ([*shape], np.array(again.view(mx.uint16)).tobytes())
    mx.save_safetensors(str(place / "model.safetensors"), tensors, {"format": "mlx"})
    words = {"group_size": size, "bits": bits, "mode": mode}
    configured(place, words, quantization=words)
    return dequantized(place, wanted)
