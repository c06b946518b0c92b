"""AMD Quark's words of configurations: `quark/torch/quantization/config` of 0.13."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


# Methods of choosing codes. Some scale weights, and norms and modules before them inversely.
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


def words(config: Mapping[str, Any]) -> Words:
    """Return the allowed keys and values of a configuration."""
    return {
        **EVERYWHERE,
        **idle("exclude quant_mode kv_cache_post_rope kv_cache_quant_config softmax_quant_spec"),
        "algo_config?": _algorithms(config.get("algo_config")),
        "export": quark_export("reorder", "order"),
        "global_quant_config": _layer(config.get("global_quant_config")),
        **{f"{key}?": _layers(config.get(key)) for key in ("layer_quant_config", "layer_type_quant_config")},
    }
