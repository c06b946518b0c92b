"""bitsandbytes' 8 bits: `int8_vectorwise_dequant` of its `functional.py`, and `Linear8bitLt` of `nn/modules.py`, 0.50.
Their words are in `words`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.features.quantized import telling
from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import Format, Part, Sizes


def _sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    if config.method in ("bitsandbytes", ""):
        yield "bitsandbytes 8-bit", {"B": 1, "C": "K"}


# A row is stored over its largest number, times 127.
_PARTS = {
    "codes": Part("+", "int8", "M K"),
    "scale": Part("=.SCB", "float32", "M/B K/C"),
    # Rows in order; others are for GPUs.
    "layout": Part("=.weight_format", "uint8", "", optional=True, tells=telling.byte("weight_format", 0)),
}
DIALECT = Dialect((Format("M K", "own", _PARTS, _sizes, times=1 / 127),), {}, telling=(".SCB",))
