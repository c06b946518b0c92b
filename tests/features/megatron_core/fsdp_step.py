"""A step of Megatron-FSDP, under the keys that Megatron-LM's own converter writes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

HIDDEN = 8
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_qkv.weight": (16, HIDDEN),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
    "pre_mlp_layernorm.weight": (HIDDEN,),
}
EXPERTS = {
    "mlp.router.weight": (2, HIDDEN),
    **{f"mlp.experts.linear_fc1.weight{number}_{part}": (6, HIDDEN) for number in range(2) for part in "wv"},
    **{f"mlp.experts.linear_fc2.weight{number}": (HIDDEN, 6) for number in range(2)},
}
DENSE = {f"mlp.linear_fc1.weight_{part}": (12, HIDDEN) for part in "wv"} | {"mlp.linear_fc2.weight": (HIDDEN, 12)}


def parameter(name: str) -> str:
    return name[:-2] if name.endswith(("_w", "_v")) else name


def saved(place: Path) -> dict[str, torch.Tensor]:
    """Save a training, and return its weights by their keys."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (20, HIDDEN)}
    for layer, kind in enumerate((DENSE, EXPERTS)):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in {**ATTENTION, **kind}.items()}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state = {f"module.module.module.{name}": {"exp_avg": w * 2, "exp_avg_sq": w * w} for name, w in weights.items()}
    settings: dict[str, Any] = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-8, "step": 7, "lr_mult": 1.0}
    meta = {
        f"module.module.module.{parameter(name)}": {**settings, "wd_mult": float(w.dim() > 1)}
        for name, w in weights.items()
    }
    whole = {
        "args": Namespace(num_layers=2, expert_model_parallel_size=2, lr=0.5),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": {f"module.{name}": tensor for name, tensor in weights.items()},
        "optimizer": {"state": state, "param_to_group_meta": meta},
        "opt_param_scheduler": {"max_lr": 0.5},
    }
    (place / "iter_0000007").mkdir(parents=True)
    dcp.save(whole, checkpoint_id=place / "iter_0000007", no_dist=True)
    return weights


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole[parameter(name)] = torch.cat([whole[name[:-2]], tensor]) if name.endswith("_v") else tensor
    return whole
