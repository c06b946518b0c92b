"""Maps that are not for the checkpoint: by its config.json, or by a prefix of its names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import load_file, save_file

CASES = Path(__file__).parent / "data"
SCALED: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0}
CONFIG = json.loads((CASES / "maxtext-llama" / "config.json").read_text())
LLAMA: dict[str, Any] = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def warned(place: Path, map_: str, config: dict[str, Any]) -> str:
    """What is said of a model of Llama, with this configuration beside it, and a map."""
    shutil.copyfile(CASES / "maxtext-llama" / "hf.safetensors", place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(config))
    padding = ["--size", "_=0"] if map_.startswith("megatron") else []
    out = place.with_name("out.safetensors")
    return done(ckptconv_here("convert", place / "model.safetensors", out, "--map", map_, *padding)).err


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_map_for_another_rotary_embedding_is_doubted(key: str, place: Path) -> None:
    said = warned(place, "maxtext-llama", {**LLAMA, key: SCALED})
    assert "config.json has rope_type 'llama3'" in said
    assert "Should the map be maxtext-llama3.1?" in said
    assert "Should the map be" not in warned(place, "maxtext-llama3.1", {**LLAMA, key: SCALED})


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_map_for_scaled_embeddings_is_doubted_for_others(rope: dict[str, Any], place: Path) -> None:
    assert "Should the map be maxtext-llama?" in warned(place, "maxtext-llama3.1", {**LLAMA, **rope})
    assert "Should the map be" not in warned(place, "maxtext-llama", {**LLAMA, **rope})


def test_the_names_of_maxtext_are_doubted_by_the_reference(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    shutil.copyfile(CASES / "maxtext-llama" / "hf.safetensors", reference / "model.safetensors")
    (reference / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": SCALED}))
    shutil.copyfile(CASES / "maxtext-llama" / "ours.safetensors", tmp_path / "ours.safetensors")
    words = ("convert", tmp_path / "ours.safetensors", tmp_path / "out", "--map", "maxtext-llama")
    assert "Should the map be maxtext-llama3.1?" in done(ckptconv_here(*words, "--like", reference)).err


def test_a_map_for_another_family_is_doubted(place: Path) -> None:
    said = warned(place, "megatron-gemma", LLAMA)
    assert "the map megatron-gemma is for models with the model_type 'gemma', but config.json has 'llama'" in said


def test_a_configuration_that_names_no_model_raises_no_doubt(place: Path) -> None:
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert "Should the map be" not in warned(place, "maxtext-llama", {**sizes, "rope_scaling": SCALED})


@pytest.mark.parametrize("prefix", ["module.", "model.module."])
def test_a_prefix_before_all_names_of_a_map_is_told(prefix: str, tmp_path: Path) -> None:
    tensors = load_file(CASES / "maxtext-llama" / "ours.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "in.safetensors")
    words = ("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--map", "maxtext-llama")
    ckptconv_here(*words).refused(2, f"Add --strip-prefix {prefix}")
    done(ckptconv_here(*words, "--strip-prefix", prefix))
    assert load_file(tmp_path / "out.safetensors").keys() == load_file(CASES / "maxtext-llama/hf.safetensors").keys()


def test_a_prefix_is_not_told_where_the_rest_does_not_fit(tmp_path: Path) -> None:
    save_file({"module.a.weight": torch.ones(2)}, tmp_path / "in.safetensors")
    words = ("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--map", "maxtext-llama")
    assert "--strip-prefix" not in ckptconv_here(*words).refused(2)
