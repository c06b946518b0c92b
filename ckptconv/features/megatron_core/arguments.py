"""The arguments of a training in Megatron-LM and the keys of transformers' configurations, each derived from the other.
Pure.

Sources: megatron/training/arguments.py of Megatron-LM with Megatron-core 0.16 to 0.19, and the `configuration_*.py` of
transformers 5. A configuration is derived by what the arguments say, for models of one family only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.text import some

# Megatron-core's names of two tensors, and a part of the names of adapters.
EMBEDDINGS, HEAD, ADAPTER = "embedding.word_embeddings.weight", "output_layer.weight", ".adapter."
UNTIED, PADDED = "untie_embeddings_and_output_weights", "padded_vocab_size"
EXPERT_PARALLEL = "expert_model_parallel_size"
HEADS, GROUPS, LAYERS, HIDDEN = "num_attention_heads", "num_query_groups", "num_layers", "hidden_size"
# Keys of configurations by argument: the first one that is there counts.
KEYS: Mapping[str, tuple[str, ...]] = {
    LAYERS: ("num_hidden_layers",),
    HEADS: ("num_attention_heads", "n_head"),
    GROUPS: ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "rotary_base": ("rope_theta",),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "moe_router_score_function": ("scoring_func",),
    **{name: (name,) for name in (HIDDEN, "q_lora_rank", "kv_lora_rank", "v_head_dim")},
}
_DENSE = (LAYERS, HIDDEN, "ffn_hidden_size", HEADS, GROUPS, "max_position_embeddings", "norm_epsilon", "rotary_base")
_WIDTH = ("kv_channels",)
_EXPERT_WIDTH = "moe_ffn_hidden_size"
_ROUTED = (_EXPERT_WIDTH, "moe_router_topk")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_GROUPED = ("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk")
# The values of a configuration for arguments that are None.
_NONE: Mapping[str, Any] = {"q_lora_rank": None, **dict(zip(_GROUPED, (1.0, 1, 1), strict=True))}
# Megatron-core scales rotary embeddings as Llama 3 does, with these numbers.
_LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
SCALES, FACTOR = "use_rope_scaling", "rope_scaling_factor"
INTERPOLATION = "rotary_seq_len_interpolation_factor"
# It scales latent attention by YaRN: the keys of numbers by argument, and those that no argument of Megatron-LM says.
_ROPE_TYPE, _ROPE, _YARN = "rope_type", "rope", "yarn"
_OF_YARN = {"rotary_scaling_factor": "factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
_ORIGINAL = "original_max_position_embeddings"
_USUAL = {_ORIGINAL: 4096, "beta_fast": 32, "beta_slow": 1}
# No argument says these.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class _Family(NamedTuple):
    """Models of transformers: the arguments that their configuration says, the values that others must have, and its
    keys for the numbers of experts and of shared ones."""

    model_type: str
    architecture: str
    arguments: tuple[str, ...]
    values: Mapping[str, Any]
    experts: str = ""
    shared: str = ""


_OF_ALL: Mapping[str, Any] = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0,
    "apply_layernorm_1p": False, "add_qkv_bias": False, "add_bias_linear": False, "qk_layernorm": False,
    "multi_latent_attention": False, "mtp_num_layers": 0, "window_size": None, "softmax_type": "vanilla",
    "softmax_scale": None, "rotary_interleaved": False, "no_rope_freq": None, "qk_l2_norm": False,
    "attention_output_gate": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0,
    "apply_residual_connection_post_layernorm": False, "moe_latent_size": None, "moe_shared_expert_gate": False,
}  # fmt: skip
_SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, _GROUPED[0]: None}
_OF_LLAMA = {name: value for name, value in _OF_ALL.items() if name != "add_bias_linear"}
_OF_QWEN2, _OF_QWEN3 = {**_OF_ALL, "add_qkv_bias": True}, {**_OF_ALL, "qk_layernorm": True}
_OF_DEEPSEEK = {
    **{name: value for name, value in _OF_QWEN3.items() if name != "mtp_num_layers"},
    "multi_latent_attention": True, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip
_EXPERTS = (*_DENSE, *_WIDTH, *_ROUTED)
_MIXTRAL = "mixtral"
# Families by the map that has their names, of those with one only.
FAMILIES: Mapping[str, _Family] = {
    "megatron-llama": _Family("llama", "LlamaForCausalLM", (*_DENSE, *_WIDTH), _OF_LLAMA),
    "megatron-qwen2": _Family("qwen2", "Qwen2ForCausalLM", (*_DENSE, *_WIDTH), _OF_QWEN2),
    "megatron-qwen3": _Family("qwen3", "Qwen3ForCausalLM", (*_DENSE, *_WIDTH), _OF_QWEN3),
    "megatron-mixtral": _Family(
        _MIXTRAL, "MixtralForCausalLM", _EXPERTS, {**_OF_ALL, **_SOFTMAX}, "num_local_experts"
    ),
    "megatron-qwen3_moe": _Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS, {**_OF_QWEN3, **_SOFTMAX}, "num_experts"
    ),
    "megatron-deepseek_v3": _Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", (*_DENSE, *_ROUTED, *_LATENT, *_GROUPED), _OF_DEEPSEEK,
        "n_routed_experts", "n_shared_experts",
    ),
}  # fmt: skip


class Configured(NamedTuple):
    """The configuration of a model; None for the `reason` that there is none. `untold` are keys that it lacks."""

    config: dict[str, Any] | None
    untold: tuple[str, ...] = ()
    reason: str = ""


def configuration(args: Mapping[str, Any], map_name: str) -> Configured:
    """Return the configuration that the arguments of a training say of a model with the names of this map. The weights
    say more: the size of the vocabulary, ties and the dtype."""
    family = FAMILIES.get(map_name)
    if family is None:
        return Configured(None, reason=f"the map {map_name} does not specify a model of transformers")
    others = [
        f"{name} is {args[name]!r}"
        for name, value in family.values.items()
        if name in args and (args[name] or None) != (value or None)
    ]
    others += [f"{name} is {args[name]!r}" for name in family.arguments if name in args and not _fits(args[name])]
    if bool(args.get("num_experts")) != bool(family.experts):
        others.append(f"num_experts is {args.get('num_experts')}")
    lacking = [name for name in (LAYERS, HIDDEN, HEADS) if args.get(name) is None]
    if others or lacking:
        said = some(others or lacking, form=str)
        contradicted = f"its arguments include {said}, which {family.model_type} in transformers does not support"
        return Configured(None, reason=contradicted if others else f"its arguments do not specify {said}")
    stated = dict(args)
    if args.get("group_query_attention") is False or family.shared:
        stated[GROUPS] = args[HEADS]
    if args.get(_EXPERT_WIDTH) is None:
        stated[_EXPERT_WIDTH] = args.get("ffn_hidden_size")
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    untold: list[str] = []
    for name in family.arguments:
        (key, *_), value = KEYS[name], stated.get(name)
        if value is not None or (name in stated and name in _NONE):
            config[key] = _NONE[name] if value is None else value
        else:
            untold.append(key)
    config["hidden_act"] = "silu"
    if family.experts:
        routed = _experts(config, stated, family)
        if routed.config is None:
            return routed
        config, untold = routed.config, [*untold, *routed.untold]
    if args.get("add_bias_linear"):
        config |= {"attention_bias": True, "mlp_bias": True}
    scaling = _yarn(args) if family.shared else _llama3(args)
    config |= {"rope_scaling": scaling} if scaling else {}
    untold += ["rope_scaling"] if scaling is None else []
    return Configured(config, (*untold, *_TOKENS))


def scaling_arguments(rope: Any, *, is_latent: bool) -> dict[str, Any] | None:
    """Return the arguments that say the scaling of rotary embeddings by a key of the configuration; None if none do."""
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return None
    kind = rope.get(_ROPE_TYPE, rope.get("type", "default"))
    if kind == "default":
        return {_ROPE_TYPE: _ROPE} if is_latent else {}
    stated = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")} | {_ROPE_TYPE: kind}
    if not is_latent:
        args = {SCALES: True, FACTOR: stated.get("factor")}
        return args if stated == _llama3(args) else None
    # The defaults of transformers for missing numbers. It heeds mscale with mscale_all_dim only.
    unscaled = {} if stated.get("mscale_all_dim") else {"mscale": 1.0, "mscale_all_dim": 0.0}
    stated = {**_USUAL, _ORIGINAL: None, **unscaled, **stated}
    args = {_ROPE_TYPE: _YARN, **{name: stated.get(key) for name, key in _OF_YARN.items()}}
    return args if stated == _yarn(args) else None


def _llama3(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of rotary embeddings, empty if there is none; None for any other than that of Llama 3."""
    factor, interpolates = args.get(FACTOR, 8.0), (args.get(INTERPOLATION) or 1) != 1
    if not args.get(SCALES) and not interpolates:
        return {}
    return None if interpolates or factor is None or not _fits(factor) else {**_LLAMA3, "factor": float(factor)}


def _yarn(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of latent attention, empty if there is none; None if the arguments do not say it.

    Megatron-core scales the softmax with and without YaRN, transformers only with it. Without it, the configuration has
    a YaRN with bounds that leave all frequencies as they are.
    """
    numbers: dict[str, Any] = {key: args.get(name) for name, key in _OF_YARN.items()}
    numbers |= {key: args.get(key, value) for key, value in _USUAL.items()}
    base, is_plain = args.get("rotary_base") or 0, args.get(_ROPE_TYPE) == _ROPE
    # Releases before 0.14 have no such argument, and scale otherwise.
    if _ROPE_TYPE not in args or any(number is None or not _fits(number or 1) for number in numbers.values()):
        return None
    factor, mscale, by = (numbers[key] for key in _OF_YARN.values())
    if factor == 1 or (is_plain and not by):
        return {}
    if factor < 1 or (is_plain and not base):
        return None
    if is_plain:
        numbers["mscale"] = mscale = by
        numbers["beta_fast"] = numbers["beta_slow"] = numbers[_ORIGINAL] / (2 * math.pi * base**1.5)
    if mscale != 1 and not (mscale and by):
        numbers["attention_factor"] = (1 + 0.1 * mscale * math.log(factor)) / (1 + 0.1 * by * math.log(factor))
    return {_ROPE_TYPE: _YARN, **numbers}


def _fits(value: Any) -> bool:
    """Return whether a configuration may have this value of an argument: a number above 0 that does not overflow."""
    return value is None or (type(value) in (int, float) and 0 < value < 1e30)


def _experts(config: dict[str, Any], args: Mapping[str, Any], family: _Family) -> Configured:
    """Return `config` with the keys about experts."""
    layers = args[LAYERS]
    with_experts = _layers_with_experts(args.get("moe_layer_freq", 1), layers)
    dense = [number for number in range(layers) if number not in with_experts]
    config = {**config, family.experts: args["num_experts"]}
    shared, width = args.get("moe_shared_expert_intermediate_size") or 0, config.get("moe_intermediate_size") or 0
    number = shared // width if width and type(shared) is int else 0
    is_apart = number * width != shared or bool(number) != bool(family.shared)
    if not with_experts or is_apart or (dense and family.model_type == _MIXTRAL):
        reason = f"its experts, in {len(with_experts)} of {layers} layers, do not match {family.model_type}"
        return Configured(None, reason=reason)
    if family.shared:
        if dense != [*range(len(dense))]:
            return Configured(None, reason="its layers without experts do not come first")
        config |= {family.shared: number, "first_k_dense_replace": len(dense), "norm_topk_prob": True}
        return Configured({**config, "num_nextn_predict_layers": args.get("mtp_num_layers") or 0})
    if family.model_type == _MIXTRAL:
        # Its one key for a width says that of the experts.
        config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))
        return Configured(config)
    config |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if "moe_router_pre_softmax" not in args:
        return Configured(config, ("norm_topk_prob",))
    return Configured({**config, "norm_topk_prob": not args["moe_router_pre_softmax"]})


def _layers_with_experts(frequency: Any, layers: int) -> list[int]:
    """Return the numbers of the layers with experts; none if the argument says nothing of each layer."""
    if type(frequency) is int and frequency > 0:
        return [*range(0, layers, frequency)]
    if type(frequency) is list and len(frequency) == layers:
        return [number for number, has_experts in enumerate(frequency) if has_experts]
    return []
