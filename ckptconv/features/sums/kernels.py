"""The kernel `WeightedSum`: numbers are added up in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptconv.tensors.dtypes import DTYPES, SUMMED, DType
from ckptconv.tensors.float_formats import numbers, numpy_module
from ckptconv.tensors.kernels import ElementMaker

# Elements that are summed at a time: with the sum and the next term, they stay in the second-level cache.
_SUMMED = 1 << 15


class WeightedSum(NamedTuple):
    """Add up numbers in float64, in their order, each times its weight, and divide by `over`: the result is float64.

    The input has the same number of elements of each of `dtypes`, kind after kind. A sum that is not a number is the
    quiet NaN without a sign or payload.
    """

    dtypes: tuple[str, ...]
    weights: tuple[float, ...]
    over: float

    @property
    def counted(self) -> str:
        """The values of the result that `apply` counts."""
        return "nan"


def _weighted_sum(kernel: WeightedSum, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    total = np.frombuffer(out, "f8")
    inputs, at, count = [], 0, 0
    for dtype in kernel.dtypes:
        inputs.append(np.frombuffer(data, f"u{DTYPES[dtype].itemsize}", len(total), at))
        at += inputs[-1].nbytes
    size = min(_SUMMED, len(total))
    single, product = np.empty(size, "u4"), np.empty(size, "f8")
    with np.errstate(all="ignore"):
        for start in range(0, len(total), _SUMMED):
            block = total[start : start + _SUMMED]
            for number, (dtype, bits, weight) in enumerate(zip(kernel.dtypes, inputs, kernel.weights, strict=True)):
                values = numbers(dtype, bits[start : start + _SUMMED], single[: len(block)])
                term = block if number == 0 else product[: len(block)]
                term[...] = values
                if weight != 1:
                    term *= weight
                if number:
                    block += term
            if kernel.over != 1:
                block /= kernel.over
            # The NaN that arithmetic gives depends on the processor.
            if math.isnan(block.sum()):
                nan = np.isnan(block)
                block[nan] = np.nan
                count += int(nan.sum())
    return count


def _fits_terms(kernel: WeightedSum, before: Sequence[DType], after: DType) -> bool:
    return (
        kernel.dtypes == tuple(dtype.name for dtype in before)
        and SUMMED.issuperset(kernel.dtypes)
        and len(kernel.weights) == len(before)
        and bool(kernel.over)
        and after.name == "float64"
    )


JOINING: dict[type[Any], ElementMaker] = {
    WeightedSum: ElementMaker(
        "sum",
        _weighted_sum,
        lambda kernel: (sum(DTYPES[dtype].itemsize for dtype in kernel.dtypes), 8),
        _fits_terms,
    ),
}
