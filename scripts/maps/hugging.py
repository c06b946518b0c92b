"""Models of transformers: as its version 5 holds what version 4 wrote, GPT-2 with linear layers, BERT's old names."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForPreTraining, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from maps.cases import Case, Tensors, numbered, same

PACKAGES = ("torch", "transformers")
_BASE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 37, "max_position_embeddings": 64,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 3,
    "num_key_value_heads": 3, "q_lora_rank": 9, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 7, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {"num_experts": 3, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 7, "mlp_only_layers": [0]},
    "qwen3_next": {
        "num_experts": 3, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9, "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v3": _LATENT,
}  # fmt: skip


def cases() -> Iterator[Case]:
    for kind, more in _MODELS.items():
        yield _versions(kind, {**_BASE, **more})
    yield _gpt_oss()
    yield _linear()
    yield _bert()


def _versions(kind: str, settings: dict[str, Any]) -> Case:
    """Return what version 5 holds, and the files of version 4's layout that it saves of that."""
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config)
    ours = _load_numbers(model)
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        hf = _saved(place)
        loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        if not same(dict(loaded.state_dict()), ours):
            raise ValueError(f"{kind}: what was saved is not what is loaded")
    made = "save_pretrained of transformers, which writes the layout of version 4, and from_pretrained back"
    return Case(f"transformers5-{kind}", f"transformers5-{kind}", ours, hf, config.to_dict(), made, PACKAGES)


def _gpt_oss() -> Case:
    """Return gpt-oss as OpenAI released it, by an account of its own of what transformers' script does: that script is
    in no release that is installed. Versions 4 and 5 of transformers hold this model in the same layout."""
    settings = {**_BASE, "num_local_experts": 3}
    config = AutoConfig.for_model("gpt_oss", **settings)
    model = AutoModelForCausalLM.from_config(config)
    hf = _load_numbers(model)
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        if not same(_saved(place), hf):
            raise ValueError("transformers 5 writes gpt-oss in another layout than it holds it in")
    around = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "norm.scale"}
    ours = {name: hf[each] for each, name in {**around, "lm_head.weight": "unembedding.weight"}.items()}
    for layer in range(config.num_hidden_layers):
        inner = {name.removeprefix(f"model.layers.{layer}."): each for name, each in hf.items() if f".{layer}." in name}
        made = {
            "attn.norm.scale": inner["input_layernorm.weight"],
            "attn.sinks": inner["self_attn.sinks"],
            "mlp.norm.scale": inner["post_attention_layernorm.weight"],
            "mlp.mlp1_weight": inner["mlp.experts.gate_up_proj"].permute(0, 2, 1),
            "mlp.mlp1_bias": inner["mlp.experts.gate_up_proj_bias"],
            "mlp.mlp2_weight": inner["mlp.experts.down_proj"].permute(0, 2, 1),
            "mlp.mlp2_bias": inner["mlp.experts.down_proj_bias"],
        }
        for word in ("weight", "bias"):
            made[f"attn.qkv.{word}"] = torch.cat([inner[f"self_attn.{each}_proj.{word}"] for each in "qkv"])
            made[f"attn.out.{word}"] = inner[f"self_attn.o_proj.{word}"]
            made[f"mlp.gate.{word}"] = inner[f"mlp.router.{word}"]
        ours |= {f"block.{layer}.{name}": each for name, each in made.items()}
    made_by = "as convert_gpt_oss_weights_to_hf.py of transformers says, without running it"
    return Case("openai-gpt_oss", "openai-gpt_oss", ours, hf, settings, made_by, PACKAGES)


def _linear() -> Case:
    """Return GPT-2 with torch's linear layers in the place of transformers' Conv1D, and as transformers has it."""
    config = AutoConfig.for_model(
        "gpt2", n_embd=12, n_layer=2, n_head=3, n_positions=10, vocab_size=37, n_inner=20, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config)
    hf = _load_numbers(model)
    ours = dict(hf)
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            linear = torch.nn.Linear(*module.weight.shape)
            linear.weight.data, linear.bias.data = module.weight.data.T.contiguous(), module.bias.data
            ours[f"{name}.weight"] = linear.weight.data
            inputs = torch.arange(3.0 * module.weight.shape[0]).reshape(3, -1)
            if not torch.equal(linear(inputs), module(inputs)):
                raise ValueError(f"{name}: the linear layer computes something else")
    made = "each Conv1D of transformers as a torch.nn.Linear that computes the same"
    return Case("gpt2-linear", "gpt2-linear", ours, hf, config.to_dict(), made, PACKAGES)


def _bert() -> Case:
    """Return BERT under the names that were converted from TensorFlow's, and as transformers loads these."""
    config = AutoConfig.for_model(
        "bert", hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, vocab_size=37,
        max_position_embeddings=10,
    )  # fmt: skip
    model = AutoModelForPreTraining.from_config(config)
    _load_numbers(model)
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        file = Path(place, "model.safetensors")
        hf = load_file(file)
        ours = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in hf.items()
        }
        save_file(ours, file, {"format": "pt"})
        loaded = dict(AutoModelForPreTraining.from_pretrained(place, dtype=torch.float32).state_dict())
        if not same({name: loaded[name] for name in hf}, hf):
            raise ValueError("BERT's old names are not loaded")
    made = "from_pretrained of transformers, of a file with these names"
    return Case("bert-gamma_beta", "bert-gamma_beta", ours, hf, config.to_dict(), made, PACKAGES)


def _load_numbers(model: PreTrainedModel) -> Tensors:
    """Give `model` parameters that are all different, and return them by name."""
    numbers = numbered(model.state_dict())
    model.load_state_dict(numbers)
    return numbers


def _saved(place: str) -> Tensors:
    (file,) = Path(place).glob("*.safetensors")
    return load_file(file)
