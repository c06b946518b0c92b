"""Checkpoints of Megatron-FSDP: torch saves them here under the keys that Megatron-LM's own converter writes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, ckptconv_here, done
from safetensors.torch import load_file

import ckptconv
from ckptconv.errors import CorruptError

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


def test_its_weights_and_states_have_the_names_of_parameters(tmp_path: Path) -> None:
    weights = joined(saved(tmp_path / "run"))
    words = ("--no-fsync", "--optimizer", tmp_path / "states.safetensors", "--verify")
    run = done(ckptconv_here("convert", tmp_path / "run", tmp_path / "model.safetensors", *words))
    assert "gate and up, _w and _v, are joined" in run.out
    assert "Not converted: 'args'" not in run.out
    assert_same(load_file(tmp_path / "model.safetensors"), weights)
    with ckptconv.open(tmp_path / "run") as opened:
        facts = opened.source.facts
    assert (facts["iteration"], facts["EP"], facts["learning rate"]) == (7, 2, 0.5)
    states = load_file(tmp_path / "states.safetensors")
    assert_same({name: states[f"{name}.exp_avg"] for name in weights}, {name: w * 2 for name, w in weights.items()})


def test_it_becomes_a_step_of_torch_dist_with_both_optimizers(tmp_path: Path) -> None:
    weights = joined(saved(tmp_path / "run"))
    step = tmp_path / "torch_dist/iter_0000007"
    done(ckptconv_here("convert", tmp_path / "run", step, "--to", "megatron", "--states", tmp_path / "run", "--verify"))
    name = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    keys = [name, f"optimizer.state.exp_avg.{name}", f"optimizer.state.param.{name}"]
    tensors = {key: torch.empty(2, 12, HIDDEN) for key in keys}
    dcp.load(tensors, checkpoint_id=step, no_dist=True)
    experts = torch.stack([weights[f"decoder.layers.1.mlp.experts.linear_fc1.weight{number}"] for number in range(2)])
    assert_same(tensors, dict(zip(keys, (experts, experts * 2, experts), strict=True)))
    common = torch.load(step / "common.pt", weights_only=False)
    assert (common["iteration"], common["args"].num_layers, common["opt_param_scheduler"]) == (7, 2, {"max_lr": 0.5})
    groups = [common["optimizer"][number]["optimizer"]["param_groups"] for number in (0, 1)]
    assert {(group["wd_mult"], group["is_expert_parallel"], group["step"]) for group in groups[0]} == {
        (1.0, False, 7),
        (0.0, False, 7),
    }
    assert {(group["wd_mult"], group["is_expert_parallel"], group["step"]) for group in groups[1]} == {(1.0, True, 7)}


def test_gate_without_up_is_refused(tmp_path: Path) -> None:
    state = {"checkpoint_version": 3.0, "model": {"module.decoder.layers.0.mlp.linear_fc1.weight_w": torch.ones(2, 2)}}
    (tmp_path / "run").mkdir()
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    with pytest.raises(CorruptError, match="needs _w and _v"):
        ckptconv.open(tmp_path / "run")


def test_a_wrapped_model_of_another_program_keeps_its_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    dcp.save({"model": {"module.a": torch.ones(2)}, "iteration": 3}, checkpoint_id=tmp_path / "run", no_dist=True)
    assert [*ckptconv.open(tmp_path / "run")] == ["module.a"]
