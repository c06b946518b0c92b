"""What a configuration counts, and an output has less of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cells import offered
from effort import every
from safetensors.torch import save_file

import ckptconv
from ckptconv.features.model_checks.counted import contradicted

NAMES = [
    "model.embed.weight",
    *(f"model.layers.{layer}.norm.weight" for layer in range(5)),
    *(f"model.layers.{layer}.mlp.experts.{expert}.up.weight" for layer in range(1, 4) for expert in range(3)),
]


def told(config: Mapping[str, Any], *left: str) -> str:
    kept = [name for name in NAMES if not any(word in name for word in left)]
    return " ".join(contradicted(config, NAMES, kept))


@every(
    "config, left, expected",
    [
        ({"num_hidden_layers": 5}, ["layers.4."], "num_hidden_layers 5, but the output has 4 of 5 model.layers.N"),
        ({"a": {"n_layer": 5}}, ["layers.4."], "a.n_layer 5"),
        ({"layer_types": ["x"] * 5}, ["layers.0."], "layer_types 5"),
        ({"num_hidden_layers": 5}, ["layers."], "0 of 5 model.layers.N"),
        # Of 5 layers one predicts further tokens.
        ({"num_hidden_layers": 4, "num_nextn_predict_layers": 1}, ["layers.4."], "num_nextn_predict_layers 1, but"),
        ({"num_hidden_layers": 4, "num_nextn_predict_layers": 0}, ["layers.4."], ""),
        ({"num_hidden_layers": 4, "num_nextn_predict_layers": 1}, ["layers.0."], "num_hidden_layers 4, but"),
        ({"n_routed_experts": 3}, ["experts.2."], "n_routed_experts 3, but the output has 2 of 3 model.layers.1.mlp"),
        ({"n_routed_experts": 3}, [".experts."], "0 of 3 model.layers.1.mlp.experts.N"),
        # What is gone with its layer is told of that.
        ({"n_routed_experts": 3}, ["layers.1."], ""),
        ({"num_hidden_layers": 5, "n_routed_experts": 3}, ["embed"], ""),
        ({"hidden_size": 5, "heads": [1] * 5}, ["layers.4."], ""),
    ],
)
def test_what_is_counted_and_left_out_is_told(config: dict[str, Any], left: list[str], expected: str) -> None:
    said = told(config, *left)
    assert expected in said
    assert bool(expected) == bool(said)


def test_the_configuration_is_that_of_the_output(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    save_file({name: torch.ones(1) for name in NAMES}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 5}))
    half: dict[str, Any] = {"include": ["model.layers.[01].*"]}

    def warned(*, output: Path = out, **options: Any) -> bool:
        return any("num_hidden_layers 5" in text for text in ckptconv.convert(source, output, **options).warnings)

    assert warned(copy_config=True, **half)
    assert not warned(copy_config=True)
    assert warned(for_hub=True, **half)
    assert not warned(output=tmp_path / "other", **half)
    # The one that lies there already.
    (tmp_path / "other" / "config.json").write_text(json.dumps({"num_hidden_layers": 5}))
    assert warned(output=tmp_path / "other", **half)
    assert warned(output=tmp_path / "other" / "model.safetensors", **half)
    for files in offered(source, **half):
        assert any("num_hidden_layers 5" in text for text in files.warnings)
