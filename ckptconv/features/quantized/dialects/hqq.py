"""HQQ: `hqq/core/quantize.py`, `bitpack.py` and `utils.py` of 0.2, as transformers stores it.

A weight is seen as a matrix whose rows, or with axis 0 columns, are groups. A word holds codes of several rows, as far
apart as there are rows of words, the first in the highest bits. Zero points are floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ckptconv.features.quantized import telling
from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import FLOATS, Format, Part, Sizes
from ckptconv.features.quantized.words import EVERYWHERE, idle
from ckptconv.tensors.computing import Bits
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Narrow

# The bits of codes, those of words, and the codes of a word.
_PACKINGS = {
    "8bit_u8": (8, 8, 1),
    "4bit_u8": (4, 8, 2),
    "3bit_32": (3, 32, 10),
    "2bit_u8": (2, 8, 4),
    "1bit_u8": (1, 8, 8),
}
# Keys that do not concern stored weights; and keys of properties that these lack.
_IDLE = "channel_wise optimize round_zero compute_dtype stores_quant_config offload_meta encoded_state_dict"
_NOT = "view_as_float quant_scale quant_zero"
_WORDS = {**EVERYWHERE, **idle("quant_config skip_modules device")}


def _unpacked(stored: LazyTensor, sizes: Sizes) -> tuple[LazyTensor, Sizes]:
    bits, word, count = _PACKINGS[sizes["packing"]]
    group, axis, numel = sizes["group_size"], sizes["axis"], math.prod(sizes["view"])
    if sizes["nbits"] != bits or stored.dtype.itemsize * 8 != word or axis > 1 or not group or numel % group:
        raise ValueError(
            f"its codes of {stored.dtype} do not have {sizes['nbits']} bits in groups of {group} along axis {axis}"
        )
    rows, columns = (numel // group, group) if axis else (group, numel // group)
    if tuple(stored.shape) != (-(-rows // count), columns):
        raise ValueError(f"its words have the shape {list(stored.shape)}; expected {[-(-rows // count), columns]}")
    shifts = [bits * at for at in reversed(range(count))]
    parts = [Convert(stored, Bits(word // 8, shift, bits, 1), DTYPES["uint8"]) for shift in shifts]
    codes = Concat(tuple(parts), 0) if bits < 8 else stored
    return Narrow(codes, 0, 0, rows), {"B": 1 if axis else "R", "C": "G" if axis else 1}


def _sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if config.method in ("hqq", ""):
        yield "HQQ", {}


_INTEGER = "int32 int64"
_TOLD = {
    "nbits": Part("=.nbits", _INTEGER, "", tells=telling.integers("nbits")),
    "group": Part("=.group_size", _INTEGER, "", tells=telling.integers("group_size")),
    "shape": Part("=.shape", _INTEGER, "2", tells=telling.integers("view", 2)),
    "axis": Part("=.axis", _INTEGER, "", tells=telling.integers("axis")),
    "packing": Part("=.packing", "uint8", "", tells=telling.text("packing", *_PACKINGS)),
    "dtype": Part("=.unpack_view_dtype", "uint8", "", True, tells=telling.text("dtype", "torch.uint8", "torch.int32")),
    **{name: Part(f"=.{name}", "uint8", "", True, tells=telling.byte(name, 0)) for name in _NOT.split()},
    **{name: Part(f"=.{name}", "uint8", "", True, tells=lambda data: {}) for name in _IDLE.split()},
}
_PARTS = {
    "codes": Part("=.W_q", "uint8 int32", "R G"),
    "scale": Part("=.scale", FLOATS, "R/B G/C"),
    "zero": Part("=.zero", FLOATS, "R/B G/C"),
    **_TOLD,
}
_FORMAT = Format("R G", "own", _PARTS, _sizes, own=True, unpacked=_unpacked)
DIALECT = Dialect((_FORMAT,), {"hqq": _WORDS}, telling=(".W_q",))
