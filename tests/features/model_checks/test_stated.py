"""Numbers of layers and experts in a configuration that are not those of the weights are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from effort import every
from safetensors.torch import save_file

import ckptconv

LAYERS = {f"model.layers.{layer}.mlp.experts.{expert}.w": torch.ones(1) for layer in range(3) for expert in range(4)}


@every(
    "config, expected",
    [
        ({"num_hidden_layers": 3, "num_experts": 4}, ""),
        ({"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 9}}, ""),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, ""),
        (
            {"num_hidden_layers": 32},
            "num_hidden_layers 32, but the weights of the output have 3 layers.",
        ),
        ({"text_config": {"n_layer": 5}}, "text_config.n_layer 5"),
        ({"n_routed_experts": 64}, "config.json says n_routed_experts 64, and the output has 4 experts in each layer."),
    ],
)
def test_numbers_that_are_not_those_of_the_weights_are_told(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    save_file(LAYERS, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    told = ckptconv.convert(tmp_path / "in", tmp_path / "out", copy_config=True).warnings
    assert len(told) == bool(expected), told
    assert expected in "".join(told)
