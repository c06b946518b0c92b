"""Layers that predict further tokens are taken off a model, and grafted onto one."""

from __future__ import annotations

from pathlib import Path

import torch
from features.model_facts import models
from features.model_facts.models import assert_equal, converted


def test_further_layers_are_taken_off_and_grafted_on(tmp_path: Path) -> None:
    shapes, config = models.latent()
    tensors = models.save(tmp_path / "m", shapes, config)
    found, _, report = converted(tmp_path / "m", tmp_path / "mtp", component="mtp")
    assert_equal(found, {name: each for name, each in tensors.items() if name.startswith("model.layers.6.")})
    assert any("num_hidden_layers 6" in warning for warning in report.warnings)
    _, told, _ = converted(tmp_path / "m", tmp_path / "bare", layers="0-5")
    assert told["num_nextn_predict_layers"] == 0
    other = models.save(tmp_path / "other", shapes, config, seed=1)
    graft = f"{tmp_path / 'other'}:model.layers.6.*"
    found, told, report = converted(tmp_path / "bare", tmp_path / "whole", graft=graft, dtype="bf16")
    for name, tensor in tensors.items():
        wanted = other[name] if name.startswith("model.layers.6.") else tensor.bfloat16()
        assert torch.equal(found[name], wanted)
        assert found[name].dtype == wanted.dtype
    assert told["num_nextn_predict_layers"] == 1
    notes = " ".join(report.notes)
    assert "grafted" in notes
    assert "A part of the model" not in notes


def test_a_number_that_a_part_and_a_graft_both_change_is_reported_once(tmp_path: Path) -> None:
    shapes, config = models.latent()
    models.save(tmp_path / "m", shapes, config)
    models.save(tmp_path / "other", shapes, config, seed=1)
    graft = f"{tmp_path / 'other'}:model.layers.6.*"
    _, told, report = converted(tmp_path / "m", tmp_path / "same", layers="0-5", graft=graft)
    assert (told["num_nextn_predict_layers"], report.configuration) == (1, {})
    graft = f"{tmp_path / 'other'}:model.layers.4.*"
    _, told, report = converted(tmp_path / "m", tmp_path / "fewer", layers="0-3", graft=graft)
    assert report.configuration == {"num_hidden_layers": ["6", "4"]}
