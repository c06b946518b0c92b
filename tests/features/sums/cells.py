"""What tests of the trunk ask of sums too."""

from __future__ import annotations

from typing import Any

import numpy as np
from faults import Plant, other_fields

from ckptconv.features.sums.kernels import WeightedSum
from ckptconv.tensors.computing import Joined
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor

NUMBERS = Inline(np.arange(1, 9, dtype="<f4").tobytes(), DTYPES["float32"], (8,))
HALVES = Inline(np.arange(16256, 16264, dtype="<u2").tobytes(), DTYPES["bfloat16"], (8,))
# A tensor of each kernel.
SAMPLES: dict[type[Any], LazyTensor] = {
    WeightedSum: Joined((NUMBERS, HALVES), WeightedSum(("float32", "bfloat16"), (1.0, 0.1), 1.1), DTYPES["float64"]),
}
# Faults of what computes, and the jobs in which verify finds each.
MADE: dict[str, tuple[Plant, list[str]]] = {
    "weights in another order": (
        other_fields(WeightedSum, weights=lambda kernel: kernel.weights[::-1]),
        ["average", "ema", "minus"],
    ),
    "another divisor": (
        other_fields(WeightedSum, over=lambda kernel: kernel.over * 2),
        ["average", "ema", "minus", "average-int4"],
    ),
}
