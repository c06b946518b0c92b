"""Averages of quantized weights: sums of their products, rounded once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from effort import every
from safetensors.torch import load_file

import ckptconv
from ckptconv.options.table import OPTIONS

if "dequantize" not in OPTIONS:
    pytest.skip("there are no quantized weights", allow_module_level=True)

from dialects import CASES, QUANTIZED, nearest, numbers, products


@every("case", CASES)
def test_a_weight_of_every_dialect_is_averaged_before_it_is_rounded(case: str, tmp_path: Path) -> None:
    exact, source = products(case, tmp_path), QUANTIZED / case
    # The sum of one and a half weights, and of a third, in float64.
    ckptconv.average([source, source], tmp_path / "sum", dequantize=True, weights=[1.5, 0.25], fsync=False)
    summed = load_file(tmp_path / "sum" / "model.safetensors")
    for name, product in exact.items():
        if product.is_floating_point():
            total = (numbers(product) * 1.5 + numbers(product) * 0.25) / 1.75
            dtype = str(summed[name].dtype).removeprefix("torch.")
            assert np.array_equal(numbers(summed[name]), nearest(total, dtype), equal_nan=True), name
