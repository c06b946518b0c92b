"""A part has the names and layouts of another program, as the part of the whole in that program's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cells import VERIFIED
from safetensors.torch import load_file, save_file

import ckptconv

# Names of layers behind the others go by their number in the configuration.
FURTHER = """
[[rule]]
one = "model.layers.{l}.norm.weight"
other = "layers.{l}.norm"
[[rule]]
one = "model.layers.{i + num_hidden_layers}.eh_proj.weight"
other = "mtp.{i}.proj"
[[rule]]
one = "model.layers.{i + num_hidden_layers}.norm.weight"
other = "mtp.{i}.norm"
"""
MAP = """
[[rule]]
one = "model.layers.{l}.mlp.{p}_proj.weight : a b"
other = "layers.{l}.{p} : b a"
[[rule]]
one = "model.layers.{l}.mlp.experts.{e}.up.weight : a b"
other = "layers.{l}.experts : e a b"
"""


def test_a_map_is_applied_to_the_part(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(1)
    shapes = {f"model.layers.{layer}.mlp.up_proj.weight": (5, 6) for layer in range(3)}
    shapes |= {
        f"model.layers.{layer}.mlp.experts.{expert}.up.weight": (2, 3) for layer in range(3) for expert in range(4)
    }
    tensors = {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "num_experts": 4}))
    (tmp_path / "map.toml").write_text(MAP)
    report = ckptconv.convert(
        tmp_path / "m",
        tmp_path / "out",
        layers="2,0",
        experts="3,1",
        map=tmp_path / "map.toml",
        **VERIFIED,
        fsync=False,
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert report.tensors == len(found) == 4
    for new, old in enumerate((2, 0)):
        assert torch.equal(found[f"layers.{new}.up"], tensors[f"model.layers.{old}.mlp.up_proj.weight"].t())
        experts = [tensors[f"model.layers.{old}.mlp.experts.{expert}.up.weight"] for expert in (3, 1)]
        assert torch.equal(found[f"layers.{new}.experts"], torch.stack(experts))


def test_a_map_reads_the_configuration_of_the_part(tmp_path: Path) -> None:
    tensors = {f"model.layers.{layer}.norm.weight": torch.full((2,), float(layer)) for layer in range(4)}
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(2)
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    told = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    (tmp_path / "m" / "config.json").write_text(json.dumps(told))
    (tmp_path / "map.toml").write_text(FURTHER)
    ckptconv.convert(tmp_path / "m", tmp_path / "out", layers="1,3", map=tmp_path / "map.toml", **VERIFIED, fsync=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"layers.0.norm", "mtp.0.norm", "mtp.0.proj"}
    assert found["mtp.0.norm"].tolist() == [3.0, 3.0]


def test_a_map_of_the_whole_is_said_to_come_after_the_part(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    names = ("model.vision_tower.a.weight", "model.language_model.b.weight")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "m" / "model.safetensors")
    config = {"model_type": "both", "text_config": {"model_type": "t"}, "vision_config": {"model_type": "v"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    rules = [f'[[rule]]\none = "{name}"\nother = "other.{name}"\n' for name in names]
    (tmp_path / "map.toml").write_text("".join(rules))
    with pytest.raises(ckptconv.UsageError, match="matches none of 1 name,") as caught:
        ckptconv.convert(tmp_path / "m", tmp_path / "out", component="vision", map=tmp_path / "map.toml")
    assert caught.value.hint.startswith("The map is applied after the part is selected. Convert with the map first")
    with pytest.raises(ckptconv.UsageError) as caught:
        ckptconv.convert(tmp_path / "m", tmp_path / "out", include="*.a.*", rename="model=x", map=tmp_path / "map.toml")
    assert "part is selected" not in caught.value.hint
