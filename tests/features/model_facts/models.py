"""Small models, made by hand: their tensors as programs name them, their configurations, and what they become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cells import VERIFIED, verified
from safetensors.torch import load_file, save_file

import ckptconv

HIDDEN, ROWS, EXPERTS = 8, 16, 8
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def of_shapes(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of these shapes."""
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def save(place: Path, shapes: Shapes, config: Mapping[str, Any] | None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Put a model into a directory, and return its tensors."""
    place.mkdir(parents=True)
    tensors = of_shapes(shapes, seed)
    save_file(tensors, place / "model.safetensors")
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    return tensors


def save_trained(file: Path, shapes: Shapes) -> None:
    """Save a model with a state of its optimizer for each parameter, as torch.save writes them."""
    weights = of_shapes(shapes)
    moments = {name: {"exp_avg": tensor} for name, tensor in weights.items()}
    states = {"state": moments, "param_groups": [{"params": [*moments]}]}
    torch.save({"model": weights, "optimizer": states}, file)


def layer(number: int, *, place: str = "model.layers", moe: bool = False, stacked: bool = False) -> Shapes:
    """A layer with attention, and an MLP or experts."""
    at = f"{place}.{number}"
    shapes: Shapes = {f"{at}.input_layernorm.weight": (HIDDEN,), f"{at}.self_attn.q_proj.weight": (HIDDEN, HIDDEN)}
    if not moe:
        return {**shapes, f"{at}.mlp.up_proj.weight": (12, HIDDEN)}
    shapes |= {f"{at}.mlp.gate.weight": (EXPERTS, HIDDEN), f"{at}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
    shapes[f"{at}.mlp.shared_experts.up_proj.weight"] = (EXPERTS, HIDDEN)
    if stacked:
        return {
            **shapes,
            f"{at}.mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 6),
            f"{at}.mlp.experts.bias": (EXPERTS, 6),
        }
    return {**shapes, **{f"{at}.mlp.experts.{expert}.up_proj.weight": (6, HIDDEN) for expert in range(EXPERTS)}}


def ends(prefix: str = "model.") -> Shapes:
    """What is before and behind the layers."""
    return {
        f"{prefix}embed_tokens.weight": (ROWS, HIDDEN),
        f"{prefix}norm.weight": (HIDDEN,),
        "lm_head.weight": (ROWS, HIDDEN),
    }


def latent() -> tuple[Shapes, dict[str, Any]]:
    """Three dense layers, three with experts in groups, and one that predicts a further token."""
    shapes = ends()
    for number in range(7):
        shapes |= layer(number, moe=number >= 3)
    shapes |= {
        "model.layers.6.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "model.layers.6.embed_tokens.weight": (ROWS, HIDDEN),
    }
    config = {
        "model_type": "made", "num_hidden_layers": 6, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "hidden_size": HIDDEN, "vocab_size": ROWS, "dtype": "float32",
    }  # fmt: skip
    return shapes, config


def mixed(stacked: bool = True) -> tuple[Shapes, dict[str, Any]]:
    """Four layers with stacked experts, of two kinds by turns."""
    shapes = ends()
    for number in range(4):
        shapes |= layer(number, moe=True, stacked=stacked)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {
        "num_hidden_layers": 4,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "layer_types": kinds,
        "vocab_size": ROWS,
    }
    return shapes, config


def seeing() -> tuple[Shapes, dict[str, Any]]:
    """A language model of three layers, and a vision model of three."""
    shapes = ends("model.language_model.")
    for number in range(3):
        shapes |= layer(number, place="model.language_model.layers")
        shapes |= layer(number, place="model.vision_tower.encoder.layers")
    shapes["model.multi_modal_projector.weight"] = (HIDDEN, HIDDEN)
    config = {
        "model_type": "whole", "dtype": "float32", "tie_word_embeddings": False, "image_token_id": 9,
        "text_config": {
            "model_type": "text", "num_hidden_layers": 3, "vocab_size": ROWS, "layer_types": ["a", "b", "c"],
        },
        "vision_config": {"model_type": "eyes", "num_hidden_layers": 3},
    }  # fmt: skip
    return shapes, config


def converted(
    source: Path, out: Path, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any], ckptconv.Report]:
    """The tensors and the configuration of a part, and the report; the output is verified twice."""
    report = ckptconv.convert(source, out, **VERIFIED, fsync=False, **options)
    assert all(verification.tensors == report.tensors for verification in verified(source, out))
    path = out / "config.json"
    return load_file(out / "model.safetensors"), json.loads(path.read_text()) if path.exists() else {}, report


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
