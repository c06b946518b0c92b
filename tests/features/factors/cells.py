"""What tests of the trunk ask of factors too."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptconv.features.factors.kernels import LowRank, Magnitude
from ckptconv.tensors.computing import Axis, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor

F32, F64, BF16 = DTYPES["float32"], DTYPES["float64"], DTYPES["bfloat16"]
MATRIX = Inline(np.arange(1, 5, dtype="<f8").tobytes(), F64, (2, 2))
FACTOR = Inline(np.array([[0.1, 3], [7, 0.7]], "<f4").tobytes(), F32, (2, 2))
NARROW = Inline(np.array([16256, 16257], "<u2").tobytes(), BF16, (2,))
# A tensor of each kernel.
SAMPLES: dict[type[Any], LazyTensor] = {
    LowRank: Tiled(
        (MATRIX, FACTOR, FACTOR),
        ((Axis(0), Axis(1)), (Axis(1), Axis(0, 0)), (Axis(0, 0), Axis(0))),
        LowRank(0.3),
        F64,
        (2, 2),
        (0, 0),
    ),
    Magnitude: Tiled((MATRIX, NARROW), ((Axis(0), Axis(1, 0)), (Axis(0),)), Magnitude(), F64, (2, 1), (0, 1)),
}
