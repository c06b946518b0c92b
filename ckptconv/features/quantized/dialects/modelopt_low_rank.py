"""Model Optimizer's NVFP4 with a low-rank part (SVDQuant): `torch/quantization/nn/modules/quant_linear.py` and
`torch/export` of 0.47. Its words are in `words`.

A module multiplies its input by the codes, and by two factors, and adds both. The names of factors are those of its
export for diffusers and for transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptconv.features.factors.kernels import MOST_RANK, with_product
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.dialects.modelopt_smoothed import NVFP4, of
from ckptconv.features.quantized.table import FLOATS, TIMES, Format, Part
from ckptconv.tensors.lazy import LazyTensor, untagged

_ENDINGS = {"left": "svdquant_lora_b", "right": "svdquant_lora_a"}
_FACTORS = {role: Part(f"=.{name} =.weight_quantizer._{name}", FLOATS, "") for role, name in _ENDINGS.items()}


def _completed(weight: LazyTensor, given: Mapping[str, LazyTensor]) -> LazyTensor:
    """Return a weight of codes with the product of the factors, each of whose columns is smoothed as the weight's is.

    Raise ValueError for factors of another shape.
    """
    left, right = untagged(given["left"]), untagged(given["right"])
    rank = left.shape[-1] if left.shape else 0
    expected = (*weight.shape[:1], rank), (rank, *weight.shape[1:])
    if len(weight.shape) != 2 or (left.shape, right.shape) != expected or not 0 < rank <= MOST_RANK:
        raise ValueError(
            f"its factors have the shapes {list(left.shape)} and {list(right.shape)}, but a weight of shape "
            f"{list(weight.shape)} requires [rows, R] and [R, columns], with R from 1 to {MOST_RANK}"
        )
    times = [untagged(given["times"])] if "times" in given else []
    return with_product(weight, left, right, *times)


_FORMAT = Format("M K", "e2m1", {**NVFP4, **_FACTORS}, of("NVFP4", "NVFP4_SVD"), scale=TIMES, completed=_completed)
DIALECT = Dialect((_FORMAT,), {}, telling=tuple(f"svdquant_lora_{factor}" for factor in "ab"))
