"""Megatron-core's models, as mcore-bridge converts them: the part of ms-swift that does.

Of the models that need Transformer Engine, what is here are their parameters: those of Megatron-core's own layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from maps.alone import only
from maps.cases import Case, Tensors, numbered
from maps.megatron import BASE, alone, gpt_model, with_names

PACKAGES = ("torch", "megatron-core", "mcore-bridge", "transformers")


def _deep_getattr(thing: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), thing)


_PACKAGES = ("mcore_bridge", "peft")
(_gpt,) = only(
    "mcore_bridge.bridge.gpt_bridge", packages=_PACKAGES,
    instead={
        "mcore_bridge.utils.deep_getattr": _deep_getattr,
        "mcore_bridge.tuners.LoraParallelLinear": type("LoraParallelLinear", (), {}),
        "peft.utils.ModulesToSaveWrapper": type("ModulesToSaveWrapper", (), {}),
    },
)  # fmt: skip
(_glm4,) = only(
    "mcore_bridge.model.gpts.glm4", packages=_PACKAGES, instead={"mcore_bridge.bridge.GPTBridge": _gpt.GPTBridge}
)


class _Loaded:
    """A tensor as mcore-bridge takes it from a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def load(self) -> torch.Tensor:
        return self._tensor


def cases() -> Iterator[Case]:
    with alone():
        yield _dense_glm4()


def _dense_glm4() -> Case:
    hf_config = {**BASE, "attention_bias": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4", **hf_config))
        shapes = with_names(gpt_model(hf_config, {"add_qkv_bias": True}, padded=False).state_dict())
    hf = numbered(model.state_dict())
    norm = shapes["decoder.final_layernorm.weight"]
    for layer in range(hf_config["num_hidden_layers"]):
        # Modules that mcore-bridge adds to Megatron-core's.
        shapes[f"decoder.layers.{layer}.self_attention.post_self_attn_layernorm.weight"] = norm
        shapes[f"decoder.layers.{layer}.mlp.post_mlp_layernorm.weight"] = norm
    ours = _convert(_glm4.Glm4Bridge, hf, shapes, hf_config, add_qkv_bias=True)
    made = "mcore-bridge's Glm4Bridge, from Hugging Face"
    return Case("megatron-glm4", "megatron-glm4", ours, hf, {**hf_config, "model_type": "glm4"}, made, PACKAGES)


def _convert(kind: Any, hf: Tensors, shapes: Tensors, hf_config: dict[str, Any], **config: Any) -> Tensors:
    """Return what a bridge of `kind` makes of `hf`: tensors of these names and shapes."""
    bridge = kind.__new__(kind)
    bridge.config = SimpleNamespace(
        **config, add_bias_linear=False, attention_output_gate=False, qk_layernorm=False, multi_latent_attention=False,
        num_moe_experts=None, enable_hyper_connections=False, padded_vocab_size=0, task_type="causal_lm",
        untie_embeddings_and_output_weights=True, hidden_size=hf_config["hidden_size"],
        num_attention_heads=hf_config["num_attention_heads"], kv_channels=hf_config["head_dim"],
        num_query_groups=hf_config["num_key_value_heads"],
    )  # fmt: skip
    bridge.is_multimodal = bridge._peft_format = False
    bridge.tp_size = bridge.ep_size = 1
    bridge._is_fp8_param = lambda _: False
    bridge.tp_rank = 0
    ours = {name: torch.full(tensor.shape, -1.0) for name, tensor in shapes.items()}
    model = _tree(ours)
    given = {name: _Loaded(tensor) for name, tensor in hf.items()}
    bridge._convert_pre_process(model, given, "", True)
    for layer in range(hf_config["num_hidden_layers"]):
        bridge._set_layer_state(getattr(model.decoder.layers, str(layer)), given, "model.layers.", layer, True)
    bridge._convert_post_process(model, given, "", True)
    if any((tensor < 0).any() for tensor in ours.values()):
        raise ValueError(f"{kind.__name__} gives not every element")
    return ours


def _tree(tensors: Tensors) -> Any:
    """Return modules that have `tensors` under their names."""
    tree = SimpleNamespace()
    for name, tensor in tensors.items():
        module = tree
        *parts, last = name.split(".")
        for part in parts:
            module.__dict__.setdefault(part, SimpleNamespace())
            module = module.__dict__[part]
        module.__dict__[last] = tensor
    return tree
