"""A component that an output lacks is told, with the option that cuts the other one out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from features.model_facts import models
from safetensors.torch import load_file

import ckptconv
from ckptconv import UsageError

LAYERS = {f"model.layers.{layer}.mlp.experts.{expert}.w": torch.ones(1) for layer in range(3) for expert in range(4)}


def test_a_component_that_globs_leave_out_is_told_with_the_option_that_cuts_the_other(tmp_path: Path) -> None:
    models.save(tmp_path / "m", *models.seeing())

    def told(number: int, **options: Any) -> str:
        report = ckptconv.convert(tmp_path / "m", tmp_path / str(number), for_hub=True, fsync=False, **options)
        return " ".join(text for text in report.warnings if "--component" in text)

    assert "describes the vision model, under vision_config" in told(1, include=["*language_model.*", "lm_head.*"])
    assert "Use --component text to convert the language model" in told(2, exclude=["*vision_tower.*"])
    assert "Use --component vision to convert the vision model" in told(3, include=["*vision_tower.*"])
    assert told(4, component="text") == told(5, exclude=["lm_head.*"]) == told(6) == ""


def test_a_language_model_without_a_module_of_its_own_is_taken_with_the_advice(tmp_path: Path) -> None:
    """As in files of Qwen2-VL."""
    shapes = {"model.norm.weight": (4,), "lm_head.weight": (6, 4), "visual.norm.weight": (4,)}
    config = {"model_type": "whole", "text_config": {"model_type": "text"}, "vision_config": {"model_type": "eyes"}}
    tensors = models.save(tmp_path / "m", shapes, config)
    with pytest.raises(UsageError, match="no text component") as refused:
        ckptconv.convert(tmp_path / "m", tmp_path / "text", component="text")
    rule = refused.value.hint.partition("--rename '")[2].partition("'")[0]
    ckptconv.convert(tmp_path / "m", tmp_path / "text", component="text", rename=[rule])
    assert load_file(tmp_path / "text" / "model.safetensors").keys() == tensors.keys() - {"visual.norm.weight"}
    report = ckptconv.convert(tmp_path / "m", tmp_path / "less", exclude="visual.*", copy_config=True)
    assert any("describes the vision model" in warning for warning in report.warnings)
    assert not any("--component" in warning for warning in report.warnings)
