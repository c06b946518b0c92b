"""Makes the cases beside it that are named here, with peft 0.21.2 and transformers 5.23: python make.py [NAME...]

Each is a tiny model with random weights (base), an adapter that peft saved (adapter), the tensors that are others in
what merge_and_unload and save_pretrained write of both (merged.safetensors), and what its configuration says of ties
(settings.json). The logits of what `ckptconv merge` writes are those of the model with the adapter.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

HERE = Path(__file__).resolve().parent
TEXT: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4,
    "num_key_value_heads": 1, "vocab_size": 20, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def llama(**more: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**TEXT, **more}))


def gpt2(**more: Any) -> PreTrainedModel:
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=20, **more)
    return AutoModelForCausalLM.from_config(config)


def seeing(kind: str, text: str, eyes: str, **more: Any) -> PreTrainedModel:
    words = {"model_type": text, **TEXT}
    config = AutoConfig.for_model(kind, text_config=words, vision_config={"model_type": eyes, **EYES}, **more)
    return AutoModelForImageTextToText.from_config(config)


def qwen_seeing() -> PreTrainedModel:
    text = {**TEXT, "num_attention_heads": 2, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 0]}}
    eyes = {"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 2, "mlp_ratio": 1, "patch_size": 2}
    config = AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=eyes)
    return AutoModelForImageTextToText.from_config(config)


def vit() -> PreTrainedModel:
    return AutoModelForImageClassification.from_config(AutoConfig.for_model("vit", num_labels=3, **EYES))


def siglip() -> PreTrainedModel:
    return AutoModel.from_config(AutoConfig.for_model("siglip_vision_model", **EYES))


def bert() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "bert", hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=20,
        max_position_embeddings=8,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def wider(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(23)


TIED = {"tie_word_embeddings": True}
PROJ = ["q_proj", "v_proj"]
# The model, what of it is trained, and what is done to the model in between.
CASES: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        lambda: seeing("llava", "llama", "clip_vision_model"), {"target_modules": [*PROJ, "linear_1", "lm_head"]}, {},
    ),
    "gemma3": (
        lambda: seeing("gemma3", "gemma3_text", "siglip_vision_model", mm_tokens_per_image=4),
        {"target_modules": PROJ}, {},
    ),
    "paligemma": (lambda: seeing("paligemma", "gemma", "siglip_vision_model"), {"target_modules": PROJ}, {}),
    "qwen2_vl": (qwen_seeing, {"target_modules": [*PROJ, "qkv", "fc1"]}, {}),
    "vit": (vit, {"target_modules": ["q_proj", "v_proj", "fc1", "projection"], "modules_to_save": ["classifier"]}, {}),
    "attention": (siglip, {"target_modules": ["attention", "q_proj"], "alpha_pattern": {"head.attention": 5}}, {}),
    "mixtral": (
        lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **TEXT, num_local_experts=3)),
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}, {},
    ),
    "tied-save": (lambda: llama(**TIED), {"target_modules": PROJ, "modules_to_save": ["embed_tokens"]}, {}),
    "tied-save-head": (lambda: llama(**TIED), {"target_modules": PROJ, "modules_to_save": ["lm_head"]}, {}),
    "tied-save-as-one": (
        lambda: llama(**TIED),
        {"target_modules": PROJ, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {},
    ),
    "tied-target-as-one": (
        lambda: llama(**TIED), {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"twice": "model.embed_tokens.weight"},
    ),
    "tied-embeddings-saved": (lambda: llama(**TIED), {"target_modules": PROJ}, {"save_embedding_layers": True}),
    "tied-tokens": (lambda: llama(**TIED), {"target_modules": PROJ, "trainable_token_indices": [3, 7, 1]}, {}),
    "tokens": (
        llama, {"target_modules": PROJ, "trainable_token_indices": {"embed_tokens": [19, 0], "lm_head": [2]}}, {},
    ),
    "wider": (llama, {"target_modules": PROJ}, {"change": wider, "save_embedding_layers": True}),
    "tied-wider": (lambda: llama(**TIED), {"target_modules": PROJ}, {"change": wider, "save_embedding_layers": True}),
    "classes": (bert, {"target_modules": ["query", "dense"], "task_type": "SEQ_CLS"}, {"headless": True}),
    "bias-of-factors": (lambda: llama(attention_bias=True), {"target_modules": PROJ, "lora_bias": True}, {}),
    "gpt2-square": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, {}),
}  # fmt: skip


def make(name: str) -> None:
    torch.manual_seed(0)
    built, trained, how = CASES[name]
    place = HERE / name
    shutil.rmtree(place, ignore_errors=True)
    model = built()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.3)
    stored = getattr(model, model.base_model_prefix) if how.get("headless") else model
    stored.save_pretrained(place / "base")
    if change := how.get("change"):
        change(model)
    tuned = get_peft_model(model, LoraConfig(**{"r": 2, "lora_alpha": 3, "init_lora_weights": False, **trained}))
    for _, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(place / "adapter", save_embedding_layers=how.get("save_embedding_layers", "auto"))
    (place / "adapter/README.md").unlink()
    merged = tuned.merge_and_unload()
    base = load_file(place / "base/model.safetensors")
    with tempfile.TemporaryDirectory() as there:
        merged.save_pretrained(there)
        found = load_file(Path(there, "model.safetensors"))
        told = json.loads(Path(there, "config.json").read_text())
    if how.get("headless"):
        prefix = f"{model.base_model_prefix}."
        found = {each.removeprefix(prefix): tensor for each, tensor in found.items()}
    if twice := how.get("twice"):
        # peft adds the product to the embedding and to the head, which are one tensor: not what was trained.
        found[twice] = (found[twice] + base[twice]) / 2
    changed = {
        each: tensor for each, tensor in found.items() if each not in base or not torch.equal(base[each], tensor)
    }
    save_file(changed, place / "merged.safetensors")
    (place / "settings.json").write_text(
        json.dumps({"tie_word_embeddings": told.get("tie_word_embeddings"), "lost": sorted(base.keys() - found.keys())})
    )
    if (place / "base/generation_config.json").exists():
        (place / "base/generation_config.json").unlink()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in sys.argv[1:] or CASES:
        make(each)
