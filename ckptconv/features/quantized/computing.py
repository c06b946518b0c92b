"""The kernels of quantized weights, and their results. `kernels` has their implementation."""

from __future__ import annotations

from typing import NamedTuple

from ckptconv.tensors.computing import Tiled, Tiling
from ckptconv.tensors.moves import DTypeName

# Elements of a tile whose codes are decoded all at once.
_MOST_DECODED = 1 << 18


def _by_rows(tensor: Tiled) -> bool:
    """Return whether a tile is computed from a few rows of codes at a time, so that intermediate results are small."""
    kernel = tensor.kernel
    assert isinstance(kernel, Dequantize)
    return len(tensor.shape) > 1 and (
        kernel.codes == "own" or (kernel.codes in ("e2m1", "int4") and tensor.axes[0][-1].num == 4)
    )


_DECODED = Tiling(
    cast_from=lambda tensor: 0 if _by_rows(tensor) else tensor.dtype.itemsize,
    most=lambda tensor: None if _by_rows(tensor) else _MOST_DECODED,
    unrounded=lambda kernel: kernel._replace(between="float32"),
    decodes=True,
)


class Dequantize(NamedTuple):
    """Make weights of quantized ones: (code − zero − `offset`) · scale, as float32; of more steps, one in another.

    The first part has the codes. `codes` says how they lie there: "own", each an element of its dtype; "e2m1", two in a
    byte, the low half first; "quarters", likewise, each a sign and 0 to 7 quarters; "e2m3" and "e3m2", four in three
    bytes, the low bits first; "int1" to "int8", so many bits of 32-bit words, the low ones first; "awq", 4 bits in the
    order of AWQ; the same with a sign, as two's complement: "signed4", "signed awq", and "signed pair", two in a byte;
    "table4", two in a byte, the high half first, or "table8": indices into the part `table`.
    `roles` names the other parts: "scale"; "zero", stored as the codes are, as int8, or as floats, and then the
    difference is rounded as the result is; "index", the group of each
    column, by which scales and zeros are looked up; "table"; "times", by which the product is multiplied; "shift",
    which is added to it.
    `over`: divide by the scale. `between` is the dtype that the result is rounded to, and before something is added the
    product too. `scales` names the scales in messages.
    """

    codes: str
    roles: tuple[str, ...]
    offset: int = 0
    over: bool = False
    between: DTypeName = "float32"
    scales: str = ""

    @property
    def tiling(self) -> Tiling:
        """The division into tiles, and their cast."""
        return _DECODED


class Quantize(NamedTuple):
    """Make codes, or the scales of blocks, of numbers: the part is those numbers.

    `made` is "codes" or "scales". A block has `rows` by `columns` of the last two dimensions; those at the edges may
    have fewer. Its scale is the largest of its absolute values over `largest`, in float32, rounded to dtype `scale`,
    or with `power` up to a power of two; 1 where all are zero. Where there are several `largest`, it is the scale
    whose codes are nearest, of equal ones the first: the sum of the squares of what codes are off by, in float32, the
    second half of them added to the first until one is left, times the square of the scale. A code is the number over
    the scale in float32, rounded to nearest, ties to even: as `codes` says a float8_e4m3fn, for "int4" an integer from
    −8 on, stored 8 more, eight in a 32-bit word, or an "e2m1", two in a byte, the first in the lowest bits. `exact`:
    codes times scales have to be the numbers, bit for bit. `name` is that of the numbers in messages.
    """

    made: str
    codes: str
    scale: str
    rows: int
    columns: int
    largest: tuple[float, ...]
    power: bool
    exact: bool
    name: str


class Largest(NamedTuple):
    """Make of numbers the largest absolute value of `columns` in a row, if `made` is "rows", float32; or of those of
    all rows, of one weight or of several, the scale of a whole weight of NVFP4: "over", 2688 times the reciprocal of
    the largest, by which scales are divided; "times", the largest over 2688, by which they are multiplied. It is 1
    where all are zero. `name` is that of the numbers in messages."""

    made: str
    columns: int
    name: str


class QuantizeFp4(NamedTuple):
    """Make "codes", two e2m1 in a byte, the first in the low half, or "scales", as `made` says, of numbers, the first
    part.

    By the `rule` "mx", a block of 32 has a float8_e8m0fnu: the power of two of its largest number, rounded up from 1.75
    of one on, less 2 powers, and at least 2^-127. By the others, one of 16 has a float8_e4m3fn, of which the second
    part is the scale (`Largest`): "over", the largest of its numbers over 6, times that, and 0.125 for zeros; "times",
    the largest over 6 times that, at least 2^-9, and 1 for zeros. A code is the number over both, in float32, rounded
    to nearest, ties to even, and of −0 as of 0. `name` is that of the numbers in messages.
    """

    made: str
    rule: str
    name: str


class Rescale(NamedTuple):
    """Make of scales that are powers of two (float8_e8m0fnu), for 32 elements each, those of NVFP4, for 16: `made` is
    "scales", float8_e4m3fn, or "global", by which they are divided, one float32.

    The last part has all scales of the weight. For "scales" the first has the codes, two e2m1 in a byte, and the second
    the scales of the tile: one too small for float8_e4m3fn is 0, and its codes have to be zeros. `name` is that of the
    weight.
    """

    made: str
    name: str
