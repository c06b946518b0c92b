"""AMD Quark's floats: `quark/torch/export` of 0.13. Its words are in `quark_words`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.dialects.quark_words import words
from ckptconv.features.quantized.table import FLOATS, TIMES, Format, Part, Sizes


def _meaning(spec: Any, order: str) -> tuple[str, Sizes]:
    """Return the name of weights with this quantization, and the sides of their groups; "" if that is not known."""
    match spec:
        case {"dtype": "fp8_e4m3" | "int8" as dtype, "qscheme": "per_tensor"}:
            return dtype, {"B": "M", "C": "K"}
        case {"dtype": "fp8_e4m3" | "int8" as dtype, "qscheme": "per_channel", "ch_axis": 0}:
            return dtype, {"B": 1, "C": "K"}
        case {"dtype": "int4" | "uint4" as dtype, "qscheme": "per_group", "ch_axis": -1 | 1, "group_size": int(size)}:
            return f"{dtype} {order}", {"C": size}
        case {"dtype": dtype, "qscheme": "per_group", "ch_axis": -1 | 1, "group_size": 32, "scale_format": "e8m0"}:
            return dtype, {"B": 1, "C": 32}
        case [{"dtype": "fp4", "group_size": int(size)}, {"dtype": "fp8_e4m3", "is_scale_quant": True}]:
            return "nvfp4", {"B": 1, "C": size}
    return "", {}


def of(called: str) -> Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]:
    """Return the `Format.sizes` of the weights with this name (`_meaning`)."""

    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        if config.method != "quark":
            return
        by_name = config.told.get("layer_quant_config") or {}
        own = [by_name[pattern] for pattern in by_name if fnmatch.fnmatchcase(name.removesuffix(".weight"), pattern)]
        # A weight does not show the type of its module.
        others = (*(config.told.get("layer_type_quant_config") or {}).values(), config.told["global_quant_config"])
        for layer in own or others:
            meaning, sides = _meaning(layer.get("weight"), config.told["export"]["pack_method"])
            if meaning == called:
                yield f"Quark {called.split(maxsplit=1)[0]}", sides

    return sizes


SCALE = Part("+_scale", FLOATS, "M/B K/C")
_POWERS = Part("+_scale", "uint8 float8_e8m0fnu", "M K/C")
_CODES = {bits: Part("+", "uint8", f"M K*{bits}/8") for bits in (4, 6)}
_NVFP4 = {"codes": _CODES[4], "scale": Part("", "float32", "M K/C")}
# The scale of a weight has the dtype of the model.
_TIMES = TIMES._replace(parts={**TIMES.parts, "scale": TIMES.parts["scale"]._replace(dtypes=FLOATS)})
_FORMATS = (
    Format("M K", "own", {"codes": Part("+", "float8_e4m3fn", "M K"), "scale": SCALE}, of("fp8_e4m3")),
    Format("M K", "e2m1", {"codes": _CODES[4], "scale": _POWERS}, of("fp4")),
    Format("M K", "e2m3", {"codes": _CODES[6], "scale": _POWERS}, of("fp6_e2m3")),
    Format("M K", "e3m2", {"codes": _CODES[6], "scale": _POWERS}, of("fp6_e3m2")),
    Format("M K", "e2m1", _NVFP4, of("nvfp4"), scale=_TIMES),
)
DIALECT = Dialect(_FORMATS, {"quark": words})
