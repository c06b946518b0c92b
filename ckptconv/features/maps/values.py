"""Values that a rule computes: each element of a side, by one operation with a number, from that of the other side.

A text such as "maxtext * sqrt(d)" names the other side, the operation, and a number: an expression of sizes, its square
root, or the reciprocal of that. The number is rounded to float32, and in "bfloat16(…)" then to bfloat16. An element is
computed in float32, or float64 if that is its dtype, and rounded to its dtype.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.maps.kernels import CODES, Arithmetic
from ckptconv.features.maps.notation import MapAxis
from ckptconv.features.maps.sizes import Expression, KnownSizes
from ckptconv.tensors.dtypes import DTYPES, SUMMED
from ckptconv.tensors.lazy import Convert, LazyTensor
from ckptconv.tensors.moves import Cast
from ckptconv.text import quoted

if TYPE_CHECKING:
    from ckptconv.features.maps.notation import Rule

_VALUE = re.compile(r"\s*(\w+)\s*([-+*/])\s*(?:(bfloat16)\((.+)\)|(.+?))\s*")
_NUMBER = re.compile(r"\s*(?:\(\s*1\s*/\s*sqrt\((.+)\)\s*\)|sqrt\((.+)\)|(.+?))\s*")
_F32 = DTYPES["float32"]


class Value(NamedTuple):
    """A parsed text: the side from which it computes, the operation, and the number: an expression, its root if
    `is_root`, or the reciprocal of that if `is_inverse`; and rounded to bfloat16 if `is_short`."""

    side: str
    operation: str
    expression: Expression
    is_root: bool
    is_inverse: bool
    is_short: bool = False

    def number(self, sizes: KnownSizes) -> float:
        """Return the number, rounded. Raise UsageError for a size that is unknown, or if it is zero."""
        known = {name: sizes.of(MapAxis((name,))) for name in self.expression.names}
        unknown = sorted(name for name, size in known.items() if size is None)
        if unknown:
            raise UsageError(
                f"{quoted(self.expression.text)} needs {unknown[0]}, whose size is not known.",
                f"Give --size {unknown[0]}=NUMBER.",
            )
        size = self.expression.value({name: size or 0 for name, size in known.items()})
        if not size:
            raise UsageError(f"{quoted(self.expression.text)} is 0; expected a number that is not zero.")
        number = math.sqrt(size) if self.is_root else float(size)
        (bits,) = struct.unpack("<I", struct.pack("<f", 1 / number if self.is_inverse else number))
        bits = bits + 0x7FFF + (bits >> 16 & 1) & ~0xFFFF if self.is_short else bits
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@functools.lru_cache(1 << 10)
def parse_value(text: str) -> Value:
    """Return the value that a text describes. Raise UsageError if it is invalid."""
    match = _VALUE.fullmatch(text)
    if not match:
        raise UsageError(f"{quoted(text)} is not a side, an operation and a number, such as 'other * sqrt(d)'.")
    side, operation, short, inside, number = match.groups()
    inverse, root, plain = _NUMBER.fullmatch(inside or number).groups()  # type: ignore[union-attr]
    return Value(side, operation, Expression(inverse or root or plain), not plain, bool(inverse), bool(short))


def computed(rule: Rule, side: int, tensor: LazyTensor, sizes: KnownSizes) -> LazyTensor:
    """Return `tensor`, which a rule made for a side, with the values that the rule computes for it.

    Raise UsageError for a tensor whose elements are not floating-point numbers, and for unknown sizes.
    """
    text = rule.values[side]
    if not text:
        return tensor
    value, dtype = parse_value(text), tensor.dtype
    if dtype.name not in SUMMED:
        rule.fail(f"it computes {quoted(text)}, which is not possible with elements of {dtype.name}.")
    try:
        number = value.number(sizes)
    except UsageError as error:
        rule.fail(f"{quoted(text)}: {error.message}", error.hint)
    wide = dtype if dtype.name in CODES else _F32
    for kernel, result in (
        (Cast(dtype.name, wide.name), wide),
        (Arithmetic(wide.name, value.operation, number), wide),
        (Cast(wide.name, dtype.name), dtype),
    ):
        if not isinstance(kernel, Cast) or kernel.source != kernel.target:
            tensor = Convert(tensor, kernel, result)
    return tensor
