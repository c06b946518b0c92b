"""Averages of quantized weights: sums of their products, rounded once, and never of codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cells import VERIFIED, of_features
from effort import every
from safetensors.torch import load_file

import ckptconv
from ckptconv.options.table import OPTIONS

if "dequantize" not in OPTIONS:
    pytest.skip("there are no quantized weights", allow_module_level=True)

(dialects,) = of_features("DIALECTS")
CASES, QUANTIZED = dialects.CASES, dialects.QUANTIZED
nearest, numbers, products = dialects.nearest, dialects.numbers, dialects.products


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


def test_codes_of_quantized_weights_are_refused_and_their_weights_averaged(place: Path) -> None:
    case = QUANTIZED / "block-fp8-f32"
    with pytest.raises(ckptconv.UsageError, match="--dequantize"):
        ckptconv.average([case, case], "out")
    ckptconv.average([case, case], "out", dequantize=True, **VERIFIED)
    ckptconv.convert(case, "once", dequantize=True)
    assert Path("once/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()


def test_quantized_weights_of_every_step_are_counted(place: Path) -> None:
    case = QUANTIZED / "block-fp8-f32"
    weights = ckptconv.convert(case, "weights", dequantize=True)
    for n, steps in enumerate(([case, "weights"], ["weights", case], [case, case])):
        report = ckptconv.average(steps, f"out{n}", dequantize=True)
        count = steps.count(case)
        assert report.dequantized == {name: count * each for name, each in weights.dequantized.items()}
        assert json.loads(Path(f"out{n}/.ckptconv-manifest.json").read_text())["dequantized"] == report.dequantized
        assert not any("has no effect" in note for note in report.notes)
