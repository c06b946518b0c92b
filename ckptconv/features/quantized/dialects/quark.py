"""AMD Quark's floats, and its words: `quark/torch/export` and `quark/torch/quantization/config` of 0.13."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import FLOATS, TIMES, Format, Part, Sizes
from ckptconv.features.quantized.words import EVERYWHERE, NOT, SIZE, Words, idle, quark_export
from ckptconv.storage.strict_json import OrNull

_SPEC = {
    **idle("observer_cls round_method scale_type zero_point_type scale_calculation_mode symmetric is_dynamic"),
    **idle("enable_buffer_reuse max_input_numel"),
    "dtype": frozenset("fp8_e4m3 int8 int4 uint4 fp4 fp6_e2m3 fp6_e3m2".split()),  # noqa: SIM905
    "qscheme": frozenset(("per_tensor", "per_channel", "per_group")),
    "ch_axis?": OrNull(range(-1, 2)),
    "group_size?": OrNull(SIZE),
    "scale_format?": OrNull(frozenset(("e8m0", "float32"))),
    "is_scale_quant?": frozenset((True, False)),
    **dict.fromkeys(("block_size?", "mx_element_dtype?"), NOT),
}


def _layer(layer: Any) -> Words:
    weight = layer.get("weight") if isinstance(layer, Mapping) else None
    spec = (_SPEC, _SPEC) if isinstance(weight, list) else _SPEC
    return {**idle("bias input_tensors output_tensors target_device"), "weight?": OrNull(spec)}


def _layers(layers: Any) -> OrNull:
    return OrNull({f"{name}?": _layer(layer) for name, layer in layers.items()} if isinstance(layers, Mapping) else {})


# How codes were chosen, and what norms and modules before have in exchange for what the weights have.
_IN_WEIGHTS = frozenset("autoround autosmoothquant awq gptaq gptq qronos smooth".split())  # noqa: SIM905
# Rotations that other weights undo, or queries and keys together. Those of inputs (R4) are undone in no weight.
_ROTATION = {
    **idle("r1 r2 r3 rotation_size random_r1 random_r2 scaling_layers backbone model_decoder_layers v_proj o_proj"),
    **idle("self_attn mlp online_config trainable train_smooth smooth_positions"),
    "name": _IN_WEIGHTS | {"rotation"},
    **dict.fromkeys(("r4?", "online_r1_rotation?"), NOT),
}


def _algorithm(algorithm: Any) -> Any:
    return object if isinstance(algorithm, Mapping) and algorithm.get("name") in _IN_WEIGHTS else _ROTATION


def _algorithms(algorithms: Any) -> OrNull:
    return OrNull(tuple(map(_algorithm, algorithms)) if isinstance(algorithms, list) else _algorithm(algorithms))


def _words(config: Mapping[str, Any]) -> Words:
    return {
        **EVERYWHERE,
        **idle("exclude quant_mode kv_cache_post_rope kv_cache_quant_config softmax_quant_spec"),
        "algo_config?": _algorithms(config.get("algo_config")),
        "export": quark_export("reorder", "order"),
        "global_quant_config": _layer(config.get("global_quant_config")),
        **{f"{key}?": _layers(config.get(key)) for key in ("layer_quant_config", "layer_type_quant_config")},
    }


def _meaning(spec: Any, order: str) -> tuple[str, Sizes]:
    """Return what the weights are called that are quantized so, and the sides of their groups; "" if that is not
    known."""
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
    """Return what is said of the weights that are called so (`_meaning`)."""

    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        if config.method != "quark":
            return
        by_name = config.told.get("layer_quant_config") or {}
        own = [by_name[pattern] for pattern in by_name if fnmatch.fnmatchcase(name.removesuffix(".weight"), pattern)]
        # What type a module is of is not known of its weight.
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
DIALECT = Dialect(_FORMATS, {"quark": _words})
