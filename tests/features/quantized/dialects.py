"""A checkpoint of each dialect of quantized weights, the products that its weights are, and rounded numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import ckptconv

Array = NDArray[Any]
QUANTIZED = Path(__file__).parent / "data"
CASES = sorted(path.name for path in QUANTIZED.iterdir() if (path / "expected.safetensors").exists())
# Weights, and what programs make of them without data: by the way that they are quantized.
MADE = {
    "mxfp4": QUANTIZED.parent / "made" / "ct-mxfp4-edge",
    "nvfp4": QUANTIZED.parent / "made" / "ct-nvfp4",
    "nvfp4-modelopt": QUANTIZED.parent / "made" / "modelopt-nvfp4-w4a16-edge",
}
# Those of which codes are made as well: one of each kind of arithmetic.
MADE_CODES = ["bnb-nf4", "bnb-nf4-nested", "gpt-oss-mxfp4", "gptq", "block-fp8-f32"]
# The digits, and the exponent of the smallest normal number, of each dtype.
FORMATS = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}


def nearest(exact: Array, dtype: str) -> Array:
    """Return each number of float64 rounded to `dtype`, to nearest, ties to even: as float64."""
    digits, least = FORMATS[dtype]
    last = np.maximum(np.frexp(exact)[1] - 1, least) - (digits - 1)
    return np.ldexp(np.rint(np.ldexp(exact, -last)), last)


def numbers(tensor: torch.Tensor) -> Array:
    array: Array = tensor.double().numpy()
    return array


def products(case: str, place: Path) -> dict[str, torch.Tensor]:
    ckptconv.convert(QUANTIZED / case, place / "products", dequantize=True, dtype="fp32", fsync=False)
    return load_file(place / "products" / "model.safetensors")
