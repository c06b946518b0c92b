"""AMD Quark's integers: `quark/torch/export/utils.py` and `nn/modules/qparamslinear.py` of 0.13. Their words are in
`quark_words`.

Those of 4 bits lie transposed, in the order of AWQ or in their own; with a sign, they are two's complement.
"""

from __future__ import annotations

from ckptconv.features.quantized.dialects import Dialect, quark
from ckptconv.features.quantized.table import FLOATS, Format, Part

_INT8 = {
    "codes": Part("+", "int8", "M K"),
    "scale": quark.SCALE,
    "zero": Part("+_zero_point", "int8", "M/B K/C", optional=True),
}
_PACKED = {
    "codes": Part("+", "int32", "K N*4/32"),
    "scale": Part("+_scale", FLOATS, "K/C N"),
    "zero": Part("+_zero_point", "int32", "K/C N*4/32"),
}
_FORMATS = (
    Format("M K", "own", _INT8, quark.of("int8")),
    Format("N K", "signed4", _PACKED, quark.of("int4 order")),
    Format("N K", "signed awq", _PACKED, quark.of("int4 reorder")),
    Format("N K", "int4", _PACKED, quark.of("uint4 order")),
    Format("N K", "awq", _PACKED, quark.of("uint4 reorder")),
)
DIALECT = Dialect(_FORMATS, {})
