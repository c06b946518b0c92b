"""Derive the arguments of a training in Megatron-LM from tensors and a configuration of transformers. Pure.

Source: megatron/training/{arguments,checkpointing}.py (load_args_from_checkpoint, check_checkpoint_args) of Megatron-LM
with Megatron-core 0.16 to 0.19. Only what shapes and keys say is derived; `untold` names keys that say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.features.megatron_core.arguments import (
    EMBEDDINGS,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    KEYS,
    LAYERS,
    PADDED,
    UNTIED,
    scaling_arguments,
)
from ckptconv.features.megatron_output.sharding import Sharded
from ckptconv.tensors.lazy import LazyTensor

# Keys that change what a model computes, and that no argument is derived of, if they have other values than these.
_UNTOLD: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "sliding_window": (None,),
    "attention_chunk_size": (None,),
    "partial_rotary_factor": (1.0, None),
    "logits_soft_cap": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
}
# Keys that say how rotary embeddings are scaled.
_SCALING = ("rope_scaling", "rope_parameters")


class Arguments(NamedTuple):
    """The arguments of a training; none if the configuration does not say enough. `untold` are keys of the
    configuration that the arguments leave out."""

    values: dict[str, Any]
    untold: tuple[str, ...] = ()


def arguments(stored: Sharded, config: Mapping[str, Any]) -> Arguments:
    """Return the arguments that `stored` tensors and the configuration of their model say."""
    given = {name: value for name, keys in KEYS.items() if (value := _first(config, keys)) is not None}
    if HEADS not in given or EMBEDDINGS not in stored.tensors:
        return Arguments({})
    rows, hidden = stored.tensors[EMBEDDINGS].shape
    heads = given[HEADS]
    groups = config.get("num_key_value_heads") or heads
    names = [*stored.tensors]
    values: dict[str, Any] = {
        **given,
        LAYERS: stored.layers,
        HIDDEN: hidden,
        GROUPS: groups,
        "group_query_attention": groups != heads,
        "kv_channels": config.get("head_dim") or hidden // heads,
        PADDED: rows,
        "vocab_size": config.get("vocab_size", rows),
        UNTIED: HEAD in stored.tensors,
        "add_bias_linear": _has(names, "linear_proj.bias"),
        "add_qkv_bias": _has(names, "linear_qkv.bias"),
        "qk_layernorm": _has(names, "q_layernorm.weight", "linear_q_up_proj.layer_norm_weight"),
        "normalization": "LayerNorm" if _has(names, "final_layernorm.bias") else "RMSNorm",
        "swiglu": _is_gated(stored),
        "multi_latent_attention": _has(names, "linear_kv_down_proj.weight"),
        "add_position_embedding": True,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    rope = config.get("rope_parameters")
    base = config.get("rope_theta", rope.get("rope_theta") if isinstance(rope, Mapping) else None)
    if type(base) in (int, float):
        values["rotary_base"] = int(base)
    # Norms of Gemma hold the difference from one, here as there.
    if str(config.get("model_type")).startswith("gemma"):
        values["apply_layernorm_1p"] = True
    routers = {name: tensor for name, tensor in stored.tensors.items() if name.endswith("mlp.router.weight")}
    if routers:
        values["num_experts"] = next(iter(routers.values())).shape[-2]
        values["moe_layer_freq"] = _frequency(stored, routers)
        is_biased = _has(names, "mlp.router.expert_bias")
        values["moe_router_enable_expert_bias"] = is_biased
        # Megatron-core has such a bias for this function only; transformers no longer writes which one it is.
        values.setdefault("moe_router_score_function", "sigmoid" if is_biased else "softmax")
        if values["moe_router_score_function"] == "softmax" and type(config.get("norm_topk_prob")) is bool:
            values["moe_router_pre_softmax"] = not config["norm_topk_prob"]
        shared = _width(stored, "mlp.shared_experts.linear_fc2.weight")
        if shared:
            values["moe_shared_expert_intermediate_size"] = shared
    else:
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}
    further = sum(name.endswith(".enorm.weight") for name in names)
    if further:
        values["mtp_num_layers"] = further
    untold = [key for key, usual in _UNTOLD.items() if config.get(key) is not None and config[key] not in usual]
    stated = {key: config[key] for key in _SCALING if config.get(key) is not None}
    for key, rope in (stated or {"": {}}).items():
        scaling = scaling_arguments(rope, is_latent=values["multi_latent_attention"])
        values |= scaling or {}
        untold += [key] if scaling is None else []
    return Arguments(values, tuple(untold))


def shape_of(tensors: Mapping[str, LazyTensor], layers: int) -> dict[str, Any]:
    """Return the arguments that the tensors of a language model with so many layers say; none of other models."""
    if EMBEDDINGS not in tensors or not layers:
        return {}
    rows, width = tensors[EMBEDDINGS].shape
    return {LAYERS: layers, HIDDEN: width, PADDED: rows, UNTIED: HEAD in tensors}


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if type(config.get(key)) in (int, float, str)), None)


def _has(names: list[str], *suffixes: str) -> bool:
    return any(name.endswith(suffix) for name in names for suffix in suffixes)


def _width(stored: Sharded, suffix: str) -> int:
    """Return the size of the last axis of the first tensor whose name ends in `suffix`; 0 if there is none."""
    return next((tensor.shape[-1] for name, tensor in stored.tensors.items() if name.endswith(suffix)), 0)


def _is_gated(stored: Sharded) -> bool:
    """Return whether the first matrix of a feed-forward layer has gate and up."""
    for name, tensor in stored.tensors.items():
        after = stored.tensors.get(name.replace("linear_fc1", "linear_fc2"))
        if name.endswith("linear_fc1.weight") and after is not None:
            return bool(tensor.shape[-2] == 2 * after.shape[-1])
    return False


def _frequency(stored: Sharded, routers: Mapping[str, Any]) -> Any:
    """Return which layers have experts: 1 if all have, else a list with 0 or 1 for each."""
    if any(".layers.mlp." in name for name in routers):
        return 1
    numbers = {int(name.split("layers.")[1].split(".")[0]) for name in routers if "decoder.layers." in name}
    return [int(number in numbers) for number in range(stored.layers)]
