"""The kernel `Arithmetic`: each element of a tensor added to, or multiplied by, a number."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.kernels import ElementMaker

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
# The dtypes in which a processor computes, by their code of numpy.
CODES = {"float32": "f4", "float64": "f8"}
# Elements to compute at a time: a block and its temporaries stay in the second-level cache.
_BLOCK = 1 << 15


class Arithmetic(NamedTuple):
    """Apply `operation`, one of `OPERATIONS`, to each element of `dtype` and a `number` that `dtype` represents. Round
    once, to nearest, ties to even. NaN keeps its bits."""

    dtype: str
    operation: str
    number: float


def _run(kernel: Arithmetic, data: memoryview, out: memoryview) -> int:
    np = numpy_module()
    code, apply = CODES[kernel.dtype], OPERATIONS[kernel.operation]
    values, result = np.frombuffer(data, code), np.frombuffer(out, code)
    number, overflows = values.dtype.type(kernel.number), 0
    with np.errstate(all="ignore"):
        for start in range(0, len(values), _BLOCK):
            block, room = values[start : start + _BLOCK], result[start : start + _BLOCK]
            room[...] = apply(block, number)
            nan, infinite = np.isnan(block), np.isinf(room)
            if nan.any():
                bits = f"u{room.itemsize}"
                room.view(bits)[nan] = block.view(bits)[nan]
            if infinite.any():
                overflows += int((infinite & np.isfinite(block)).sum())
    return overflows


def _fits(kernel: Arithmetic, before: Sequence[DType], after: DType) -> bool:
    return (
        kernel.dtype in CODES
        and [dtype.name for dtype in before] == [kernel.dtype] == [after.name]
        and kernel.operation in OPERATIONS
        and type(kernel.number) is float
        and 0 < abs(kernel.number) < float("inf")
    )


JOINING: dict[type[Any], ElementMaker] = {
    Arithmetic: ElementMaker("arithmetic", _run, lambda kernel: (DTYPES[kernel.dtype].itemsize,) * 2, _fits)
}
