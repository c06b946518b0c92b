"""What Model Optimizer smooths, and its integers: `torch/export/quant_utils.py`, `torch/quantization/nn/modules` and
`algorithms.py` of 0.47. Their words are in `words`.

What a module multiplies its input by, each column of its weight is multiplied by. Of integers of 4 bits, each byte has
those of two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import FLOATS, TIMES, Format, Part, Sizes

_SMOOTHING = Part("=.pre_quant_scale", FLOATS, "K", optional=True)


def _of(called: str, *algorithms: str) -> Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]:
    def sizes(told: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        layer = told.layer(name) or told.told
        if not {*told.algorithms(name)}.isdisjoint(algorithms):
            size = layer.get("group_size") or {"NVFP4": 16, "int4": 128}.get(called)
            yield called, {"B": 1, "C": size if called != "int8" else "K"}

    return sizes


_NVFP4 = {
    "codes": Part("+", "uint8", "M K*4/8"),
    "scale": Part("", "float32", "M/B K/C"),
    "times": _SMOOTHING,
}
_INT4 = {
    "codes": Part("+", "uint8", "M*4/8 K"),
    "scale": Part("+_scale", FLOATS, "M/B K/C"),
    "times": _SMOOTHING,
}
_INT8 = {"codes": Part("+", "int8", "M K"), "scale": Part("+_scale", FLOATS, "M/B K/C"), "times": _SMOOTHING}
_FORMATS = (
    Format("M K", "e2m1", _NVFP4, _of("NVFP4", "NVFP4_AWQ"), scale=TIMES),
    Format("M K", "signed pair", _INT4, _of("int4", "W4A16_AWQ")),
    Format("M K", "own", _INT8, _of("int8", "W8A16", "W8A8_SQ_PER_CHANNEL")),
)
DIALECT = Dialect(_FORMATS, {}, telling=(".pre_quant_scale",))
