"""Model Optimizer's MXFP4, integers, and smoothed weights: `torch/export/quant_utils.py` and
`torch/quantization/nn/modules` of 0.47. Their words are in `words`.

What a module multiplies its input by, each column of its weight is multiplied by. Of integers of 4 bits, each byte has
those of two rows. The second scale of W4A8_AWQ is that of the float8 in which GPUs multiply: no weight is stored so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import FLOATS, TIMES, Format, Part, Sizes
from ckptconv.features.quantized.words import OF_MXFP4

_SMOOTHING = Part("=.pre_quant_scale", FLOATS, "K", optional=True)


def of(called: str, *algorithms: str) -> Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]:
    """Return the `Format.sizes` of weights of these algorithms of Model Optimizer, which are `called` so."""

    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        layer = config.layer(name) or config.told
        if not {*config.algorithms(name)}.isdisjoint(algorithms):
            size = layer.get("group_size") or {"NVFP4": 16, "MXFP4": 32, "int4": 128}.get(called)
            yield called, {"B": 1, "C": size if called != "int8" else "K"}

    return sizes


NVFP4 = {
    "codes": Part("+", "uint8", "M K*4/8"),
    "scale": Part("", "float32", "M/B K/C"),
    "times": _SMOOTHING,
}
_INT4 = {
    "codes": Part("+", "uint8", "M*4/8 K"),
    "scale": Part("+_scale", FLOATS, "M/B K/C"),
    "times": _SMOOTHING,
}
_W4A8 = {**_INT4, "of inputs": Part("+_scale_2", FLOATS, "", tells=lambda data: {})}
_MXFP4 = {"codes": Part("+", "uint8", "M K*4/8"), "scale": Part("+_scale", "uint8", "M/B K/C")}
_INT8 = {"codes": Part("+", "int8", "M K"), "scale": Part("+_scale", FLOATS, "M/B K/C"), "times": _SMOOTHING}
_FORMATS = (
    Format("M K", "e2m1", NVFP4, of("NVFP4", "NVFP4_AWQ"), scale=TIMES),
    Format("M K", "e2m1", _MXFP4, of("MXFP4", *OF_MXFP4)),
    Format("M K", "signed pair", _INT4, of("int4", "W4A16_AWQ")),
    Format("M K", "signed pair", _W4A8, of("int4", "W4A8_AWQ")),
    Format("M K", "own", _INT8, of("int8", "W8A16", "W8A8_SQ_PER_CHANNEL")),
)
DIALECT = Dialect(_FORMATS, {}, telling=(".pre_quant_scale",))
