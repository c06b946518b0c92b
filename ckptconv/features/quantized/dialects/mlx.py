"""MLX: `mlx_lm/utils.py` of mlx-lm 0.32, `mlx/nn/layers/quantized.py` and `mlx/backend/cpu/quantized.cpp` of MLX 0.32.

A configuration has what differs for a module under the name of that: what is said, or false. AutoRound writes weights
so too, and says so in its own words beside (`export/export_to_mlx/export.py` of 0.16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import FLOATS, Format, Part, Sizes, always
from ckptconv.features.quantized.words import SIZE, Words, idle
from ckptconv.storage.strict_json import OrNull

# The bits and the groups of the modes that have no others.
_FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
_WORDS = {
    "bits": range(1, 9),
    "group_size": SIZE,
    "mode?": OrNull(frozenset(("affine", *_FIXED))),
    "global_scale?": frozenset((True, False)),
}
# The largest number of float8_e4m3fn times that of e2m1: MLX's global scale is the largest number of the weight.
_LARGEST = 448.0 * 6


def _words(config: Mapping[str, Any]) -> Words:
    known = {**_WORDS, **idle("quant_method packing_format sym data_type")}
    of_modules = {
        f"{name}?": object if value is False else _WORDS
        for name, value in config.items()
        if name not in known and f"{name}?" not in known and (value is False or isinstance(value, dict))
    }
    return {**known, **of_modules}


def _of(mode: str, is_global: bool = False) -> Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]:
    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        own = config.told.get(name.removesuffix(".weight")) if config.method == "mlx" else False
        said = own if own is False or isinstance(own, dict) else config.told
        if said is False or (said.get("mode") or "affine") != mode or bool(said.get("global_scale")) != is_global:
            return
        bits, size = said["bits"], said["group_size"]
        if _FIXED.get(mode, (bits, size)) == (bits, size):
            yield f"MLX int{bits}" if mode == "affine" else f"MLX {mode}", {"b": bits, "C": size}

    return sizes


def _affine(dtype: str) -> Format:
    parts = {
        "codes": Part("+", "uint32", "M K*b/32"),
        "scale": Part("=.scales", dtype, "M K/C"),
        "shift": Part("=.biases", dtype, "M K/C"),
    }
    return Format("M K", "int", parts, _of("affine"), own=True)


_E2M1 = Part("+", "uint32", "M K*4/8", seen="uint8")
_POWERS = Part("=.scales", "uint8", "M K/C", seen="float8_e8m0fnu")
_FLOAT8 = Part("=.scales", "uint8", "M K/C", seen="float8_e4m3fn")
_SCALES = {"codes": _FLOAT8._replace(shape="R S"), "scale": Part("=.global_scale", "float32", "R/R S/S")}
_FORMATS = (
    *map(_affine, FLOATS.split()),
    Format("M K", "e2m1", {"codes": _E2M1, "scale": _POWERS}, _of("mxfp4")),
    Format("M K", "own", {"codes": Part("+", "uint32", "M K", seen="float8_e4m3fn"), "scale": _POWERS}, _of("mxfp8")),
    Format("M K", "e2m1", {"codes": _E2M1, "scale": _FLOAT8}, _of("nvfp4")),
    Format(
        "M K",
        "e2m1",
        {"codes": _E2M1, "scale": Part("", "float32", "M K/C")},
        _of("nvfp4", is_global=True),
        scale=Format("R S", "own", _SCALES, always, divided=_LARGEST),
    ),
)
DIALECT = Dialect(_FORMATS, {"mlx": _words})
