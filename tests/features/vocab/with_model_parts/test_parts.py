"""Layers, experts and rows of the vocabulary are cut together."""

from __future__ import annotations

from pathlib import Path

import torch
from features.model_facts import models
from features.model_facts.models import converted


def test_layers_experts_and_rows_go_together(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    tensors = models.save(tmp_path / "m", shapes, config)
    found, told, _ = converted(tmp_path / "m", tmp_path / "out", layers=[3, 1], experts="0-3", vocab=10)
    assert torch.equal(found["model.layers.0.mlp.gate.weight"], tensors["model.layers.3.mlp.gate.weight"][:4])
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"][:10])
    assert told == {
        **config, "num_hidden_layers": 2, "num_local_experts": 4, "vocab_size": 10,
        "layer_types": ["full_attention", "full_attention"],
    }  # fmt: skip
