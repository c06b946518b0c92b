"""litgpt's models, as its scripts convert them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.scripts import convert_hf_checkpoint as from_hf
from litgpt.scripts import convert_lit_checkpoint as to_hf
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from maps.cases import Case, Tensors, numbered, same

PACKAGES = ("torch", "litgpt", "transformers")
_BASE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 37, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# By case: the map, a model of the kind that litgpt knows, and its kind in transformers.
_MODELS = {
    "litgpt-llama": ("litgpt-llama", "Llama-3.1-8B", "llama"),
    "litgpt-llama-qwen2": ("litgpt-llama", "Qwen2.5-7B", "qwen2"),
    "litgpt-llama-qwen3": ("litgpt-llama", "Qwen3-8B", "qwen3"),
    "litgpt-gemma": ("litgpt-gemma", "Gemma-2-9b", "gemma2"),
    "litgpt-gemma-3": ("litgpt-gemma", "Gemma-3-1b-it", "gemma3_text"),
    "litgpt-phi": ("litgpt-phi", "phi-4", "phi3"),
    "litgpt-mixtral": ("litgpt-mixtral", "Mixtral-8x7B-v0.1", "mixtral"),
    "litgpt-qwen3_moe": ("litgpt-qwen3_moe", "Qwen3-30B-A3B", "qwen3_moe"),
}
_EXPERTS = {"num_local_experts": 3, "num_experts": 3, "moe_intermediate_size": 7, "num_experts_per_tok": 2}


def saved(model: PreTrainedModel) -> Tensors:
    """Return the tensors of a model's files, in which experts have names of their own."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        return load_file(Path(place, "model.safetensors"))


def cases() -> Iterator[Case]:
    for name, (map_, known, kind) in _MODELS.items():
        experts = kind in ("mixtral", "qwen3_moe")
        settings = {**_BASE, **(_EXPERTS if experts else {})}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
        hf = numbered(saved(model) if experts else model.state_dict())
        config = Config.from_name(known, n_layer=2, n_head=6, n_query_groups=2, head_size=4, n_embd=24)
        ours: dict[str, torch.Tensor] = {}
        back: dict[str, torch.Tensor] = {}
        if kind == "phi3":
            from_hf.copy_weights_phi(config, {}, ours, dict(hf))
            to_hf.copy_weights_phi(config, back, dict(ours))
        elif kind == "gemma2":
            from_hf.copy_weights_gemma_2({}, ours, dict(hf))
            to_hf.copy_weights_gemma_2(config, back, dict(ours), untie_weights=False)
        elif kind == "gemma3_text":
            from_hf.copy_weights_gemma_3({}, ours, dict(hf), config=config)
            to_hf.copy_weights_gemma_3(config, back, dict(ours), untie_weights=False)
        elif kind == "qwen2":
            from_hf.copy_weights_qwen_2_5(config, {}, ours, dict(hf))
            to_hf.copy_weights_qwen_2_5(config, back, dict(ours))
        elif kind in ("qwen3", "qwen3_moe"):
            from_hf.copy_weights_qwen_3(config, {}, ours, dict(hf))
            to_hf.copy_weights_qwen_3(config, back, dict(ours))
        else:
            from_hf.copy_weights_hf_llama(config, {}, ours, dict(hf))
            to_hf.copy_weights_llama(config, back, dict(ours))
        if not same(back, hf):
            raise ValueError(f"{name}: litgpt does not undo its conversion")
        made = "convert_hf_checkpoint.py, and convert_lit_checkpoint.py back"
        yield Case(name, map_, ours, hf, {**settings, "model_type": kind}, made, PACKAGES)
