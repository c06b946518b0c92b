"""The configuration of an adapter of PEFT follows from that of the training in a step of Megatron-Bridge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import ckptconv_here, done
from effort import every
from features.megatron_adapters.steps import ALPHA, LAYERS, LORA, RANK, TRAINED, Model, trained
from safetensors.torch import load_file

from ckptconv import convert
from ckptconv.errors import CkptconvError

MODELS = ("megatron-llama", "megatron-qwen2", "megatron-qwen3")
TO_STEP = ("--to", "megatron")


def words(model: Model, *more: object) -> tuple[object, ...]:
    return ("--map", model.map, "--config", model.config_file, "--no-fsync", *more)


def test_the_configuration_follows_from_that_of_the_training(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    more = "  dropout: 0.5\n  dropout_position: post\n  target_modules: [linear_proj]\n"
    more += "checkpoint:\n  hf_source_path: a/b\n"
    tensors = {name: tensor for name, tensor in model.stacked().items() if "linear_proj" in name}
    run = ckptconv_here("convert", trained(tmp_path / "step", tensors, more), tmp_path / "out", *words(model))
    done(run)
    assert json.loads((tmp_path / "out/adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "a/b",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.5,
        "bias": "none",
        "inference_mode": True,
        "target_modules": ["o_proj"],
    }
    assert "PEFT applies dropout before the first factor" in run.out


def test_modules_of_some_layers_are_called_by_their_whole_names(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    some = {name: tensor for name, tensor in model.adapters.items() if "_proj" in name or f"{LAYERS}0" in name}
    done(ckptconv_here("convert", trained(tmp_path / "step", some), tmp_path / "out", *words(model)))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_modules"] == sorted(
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for name in load_file(tmp_path / "out/adapter_model.safetensors")
        if ".lora_A." in name
    )


@every(
    "text, more, told",
    [
        (LORA.format(RANK + 1, ALPHA), "", f"has the rank {RANK}, but dim in"),
        (TRAINED, "  use_rslora: true\n", "have the unknown settings 'use_rslora'"),
        (TRAINED, "  target_modules: all\n", "target_modules is 'all', but a list of names was expected"),
        (TRAINED, "  dropout: much\n", "dropout of its adapters is 'much', but a number was expected"),
    ],
)
def test_settings_that_cannot_be_told_are_refused(text: str, more: str, told: str, tmp_path: Path) -> None:
    model = Model("megatron-llama")
    source = trained(tmp_path / "step", model.stacked(), more, text)
    with pytest.raises(CkptconvError) as caught:
        convert(source, tmp_path / "out", map=model.map, config=model.config_file)
    assert told in caught.value.message
    assert not (tmp_path / "out").exists()
