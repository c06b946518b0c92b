"""The files that are left in the folders of pipelines, and next to these."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import ckptconv

WEIGHTS = {"conv_in.bias": torch.zeros(3)}


def test_what_is_beside_the_models_of_a_pipeline_is_named(tmp_path: Path) -> None:
    here, unet = tmp_path / "pipeline", tmp_path / "pipeline" / "unet"
    unet.mkdir(parents=True)
    (here / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    for name in ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin"):
        torch.save(WEIGHTS, unet / name)
    (here / "sd-v1.ckpt").write_bytes(b"")
    left = ckptconv.convert(here, tmp_path / "out").left
    other = unet / "diffusion_pytorch_model.fp16.bin"
    assert left == {str(here / "sd-v1.ckpt"): "other weights", str(other): "other weights"}


def test_folders_that_are_no_modules_are_named(tmp_path: Path) -> None:
    here = tmp_path / "sentences"
    (here / "1_Pooling").mkdir(parents=True)
    (here / "onnx").mkdir()
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (here / "modules.json").write_text(json.dumps(modules))
    torch.save(WEIGHTS, here / "pytorch_model.bin")
    assert ckptconv.convert(here, tmp_path / "hub", for_hub=True).left == {str(here / "onnx"): "folders are not copied"}
    single = ckptconv.convert(here, tmp_path / "one.safetensors").left
    assert {Path(path).name for path in single} == {"modules.json", "1_Pooling", "onnx"}
