"""What is meant by a path that does not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptconv.formats.suggestions import nearby
from ckptconv.storage.location import Location


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for directory in ("adapter", "torch-shards", "shards", "plain", "run/checkpoint-500", "two", "steps"):
        (tmp_path / directory).mkdir(parents=True)
    weights = {"w": torch.ones(2)}
    save_file(weights, tmp_path / "adapter/adapter_model.safetensors")
    for directory, name, save in (
        ("torch-shards", "pytorch_model{}.bin", torch.save),
        ("shards", "model{}.safetensors", save_file),
    ):
        save(weights, tmp_path / directory / name.format("-00001-of-00001"))
        index = {"metadata": {}, "weight_map": {"w": name.format("-00001-of-00001")}}
        (tmp_path / directory / f"{name.format('')}.index.json").write_text(json.dumps(index))
    for name in ("epoch=3-step=900.ckpt", "weights.bin"):
        torch.save(weights, tmp_path / "plain" / name)
    for number in (900, 1000, 2000):
        (tmp_path / "steps" / f"step-{number}").mkdir()
    for name in ("model-best.pt", "model-last.pt"):
        torch.save(weights, tmp_path / "two" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        # A model's usual name, where its weights have another.
        ("adapter/adapter_model.bin", "The weights in adapter have other names. Give this directory."),
        ("torch-shards/pytorch_model.bin", "in torch-shards have other names. Give this directory."),
        ("torch-shards/model.safetensors", "in torch-shards have other names. Give this directory."),
        ("shards/model.safetensors", "in shards have other names. Give this directory."),
        # The only name that goes on as this one begins, or that has another ending.
        ("plain/epoch=3.ckpt", "Did you mean plain/epoch=3-step=900.ckpt?"),
        ("plain/weights.safetensors", "Did you mean plain/weights.bin?"),
        ("run/checkpoint", "Did you mean run/checkpoint-500?"),
        # The model in a directory, and a directory with a similar name.
        ("shards.safetensors", "Did you mean shards?"),
        ("steps.safetensors", ""),
        ("runs/checkpoint-500", "Did you mean run/checkpoint-500?"),
        ("runs/a/checkpoint-500", ""),
        # Another number is another step: which ones there are.
        ("steps/step-1500", "Its directory contains step-900, step-1000, step-2000."),
        # Nothing is known where several do, or where there is no model.
        ("two/model.pt", ""),
        ("run/pytorch_model.bin", ""),
    ],
)
def test_the_file_that_is_meant_is_named(path: str, said: str) -> None:
    assert nearby(Location(path)).endswith(said)
    assert bool(nearby(Location(path))) == bool(said)
