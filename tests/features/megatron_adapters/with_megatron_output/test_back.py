"""An adapter of PEFT becomes a step of Megatron-Bridge, and a step one of PEFT and again a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from features.megatron_adapters.steps import ALPHA, LAYERS, RANK, TRAINED, Model, Tensors, trained
from safetensors.torch import load_file, save_file

from ckptconv import convert
from ckptconv.errors import CkptconvError

MODELS = ("megatron-llama", "megatron-qwen2", "megatron-qwen3")
TO_STEP = ("--to", "megatron")


def words(model: Model, *more: object) -> tuple[object, ...]:
    return ("--map", model.map, "--config", model.config_file, "--no-fsync", *more)


def equal(model: Model, place: Path, **config: Any) -> Path:
    """An adapter of PEFT that is one of `model`: modules that Megatron-core joins have one first factor."""
    model.shaped(place, **config)
    factors = load_file(place / "adapter_model.safetensors")
    torch.manual_seed(2)
    first: dict[str, torch.Tensor] = {}
    for name, factor in factors.items():
        above = name.rpartition("_proj.")[0].rpartition(".")[0]
        shared = f"{above} {factor.shape}" if ".lora_A." in name else name
        factors[name] = first.setdefault(shared, torch.randn(factor.shape))
    save_file({name: factor.clone() for name, factor in factors.items()}, place / "adapter_model.safetensors")
    return place


def held(place: Path) -> Tensors:
    """The tensors of a step, which has nothing else among them."""
    described = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(each.size) for name, each in described.items()}
    dcp.load(tensors, checkpoint_id=place, no_dist=True)
    return tensors


@every("name", MODELS)
def test_there_and_back_without_a_reference(name: str, tmp_path: Path) -> None:
    model = Model(name)
    source = trained(tmp_path / "step", model.stacked())
    run = ckptconv_here("convert", source, tmp_path / "peft", *words(model))
    done(run)
    assert f"adapter_config.json follows from {source}/run_config.yaml: lora_alpha is {ALPHA}." in run.out
    assert "has no base_model_name_or_path" in run.out
    back = tmp_path / "run/iter_0000007"
    run = ckptconv_here("convert", tmp_path / "peft", back, *words(model, *TO_STEP, "--like", source))
    done(run)
    settings = f"Train its adapters with dim {RANK}, alpha {ALPHA}, dropout 0"
    assert (
        f"{settings}, as {tmp_path}/peft/adapter_config.json says: {source}/run_config.yaml says the same." in run.out
    )
    assert_same(held(back), model.stacked())
    assert (back / "run_config.yaml").read_text() == TRAINED
    done(ckptconv_here("convert", back, tmp_path / "again", *words(model)))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "peft" / file).read_bytes()
    done(ckptconv_here("verify", source, tmp_path / "peft"))
    done(ckptconv_here("verify", tmp_path / "peft", back, "--map", model.map, "--like", source))


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def whole(tensors: Tensors) -> Tensors:
    return tensors


@every(
    "config, step_of, more, told",
    [
        ({"lora_alpha": ALPHA + 1}, whole, "", "says dim 2, alpha 5, dropout 0, but adapter_config.json of"),
        ({"lora_dropout": 0.5}, whole, "", "says dim 2, alpha 5, dropout 0.5."),
        ({}, whole, "  target_modules: ['*.layers.0.*.linear_*', linear_proj]\n", "layers.1.mlp.linear_fc1"),
        ({}, without("linear_fc2"), "", "layers.0.mlp.linear_fc2.adapter.linear_in.weight ("),
        ({}, without(".adapter."), "", ", there none)"),
        ({}, lambda tensors: {name: tensor[..., :1] for name, tensor in tensors.items()}, "", ", 1))"),
        ({"use_rslora": True}, whole, "", "use_rslora, which LoRA of Megatron-Bridge does not have"),
        ({"modules_to_save": ["lm_head"]}, whole, "", "modules_to_save, which LoRA of Megatron-Bridge does not have"),
    ],
)
def test_a_step_with_other_adapters_is_refused(
    config: dict[str, Any], step_of: Callable[[Tensors], Tensors], more: str, told: str, tmp_path: Path
) -> None:
    model = Model("megatron-llama")
    like = trained(tmp_path / "step", {**step_of(model.stacked()), "other": torch.zeros(1)}, more)
    source = equal(model, tmp_path / "peft", **config)
    settings = {"map": model.map, "config": model.config_file, "to": "megatron"}
    with pytest.raises(CkptconvError) as caught:
        convert(source, tmp_path / "out", like=like, **settings)
    assert told in caught.value.message
    assert not (tmp_path / "out").exists()


def test_without_a_step_to_be_like_the_settings_are_said(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    run = ckptconv_here("convert", equal(model, tmp_path / "peft"), tmp_path / "out", *words(model, *TO_STEP))
    done(run)
    assert f"dim {RANK}, alpha {ALPHA}, dropout 0, as {tmp_path}/peft/adapter_config.json says: the step" in run.out
    assert "No arguments were written: embeddings and a config.json" in run.out
    assert len(held(tmp_path / "out/release")) == len(model.stacked())


@every(
    "lost, to, code, told",
    [
        ("k_proj.lora_A", "megatron", 2, "k_proj.lora_A.weight', which is missing"),
        ("layers.1.", "megatron", 5, "has adapters of 1 layers, and its model has 2"),
        ("", "megatron-fsdp", 5, "has adapters, and megatron-fsdp writes models only"),
    ],
)
def test_adapters_without_a_place_in_a_step_are_refused(
    lost: str, to: str, code: int, told: str, tmp_path: Path
) -> None:
    model = Model("megatron-llama")
    file = equal(model, tmp_path / "peft") / "adapter_model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if not lost or lost not in name}, file)
    run = ckptconv_here("convert", file.parent, tmp_path / "out", *words(model, "--to", to))
    assert (run.code, (tmp_path / "out").exists()) == (code, False)
    assert told in run.err
    assert "ckptconv merge" in run.err


def test_first_factors_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    file = equal(model, tmp_path / "peft") / "adapter_model.safetensors"
    factors = load_file(file)
    factors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"] += 1
    save_file(factors, file)
    run = ckptconv_here("convert", file.parent, tmp_path / "out", *words(model, *TO_STEP))
    assert (run.code, (tmp_path / "out").exists()) == (4, False)
    assert f"'{LAYERS}1.mlp.linear_fc1.adapter.linear_in.weight' is stored twice" in run.err
    assert "with one first factor (lora_A), and so gate and up" in run.err
