"""A step of Megatron-Bridge that holds adapters alone becomes a directory of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import verified_here
from checkpoints import ckptconv_here, done
from effort import every
from safetensors.torch import load_file, save_file

from ckptconv.features.megatron_adapters import training
from ckptconv.features.megatron_bridge import run_config

from .steps import ALPHA, LAYERS, LORA, MODULES, RANK, Model, Tensors, step

MODELS = ("megatron-llama", "megatron-qwen2", "megatron-qwen3")


def words(model: Model, *more: object) -> tuple[object, ...]:
    return ("--map", model.map, "--config", model.config_file, "--no-fsync", *more)


def converted(model: Model, place: Path) -> Path:
    """The directory of PEFT that a step of the adapters of `model` becomes."""
    source, like = step(place / "step", model.stacked()), model.shaped(place / "like")
    done(ckptconv_here("convert", source, place / "peft", *words(model, "--like", like)))
    return place / "peft"


@every("name", MODELS)
def test_what_it_adds_to_the_model_is_what_megatron_adds(name: str, tmp_path: Path) -> None:
    model = Model(name)
    peft = converted(model, tmp_path)
    (tmp_path / "base").mkdir()
    save_file(model.hf, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    (tmp_path / "base" / "config.json").write_text(json.dumps(model.config))
    done(ckptconv_here("merge", tmp_path / "base", peft, tmp_path / "merged", "--no-fsync"))
    save_file(model.merged(), tmp_path / "megatron.safetensors")
    done(ckptconv_here("convert", tmp_path / "megatron.safetensors", tmp_path / "hf", *words(model)))
    merged, expected = (load_file(tmp_path / out / "model.safetensors") for out in ("merged", "hf"))
    assert {*expected} == {*model.hf}
    for weight, tensor in expected.items():
        torch.testing.assert_close(merged[weight], tensor, rtol=1e-6, atol=1e-6, msg=weight)
        is_adapted = weight.endswith(tuple(f"{module}.weight" for module in MODULES))
        assert torch.equal(tensor, model.hf[weight]) != is_adapted


def test_it_has_every_factor_by_itself_and_the_configuration(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    peft = converted(model, tmp_path)
    files = {path.name for path in peft.iterdir() if not path.name.startswith(".")}
    assert files == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads((peft / "adapter_config.json").read_text())["lora_alpha"] == ALPHA
    factors = load_file(peft / "adapter_model.safetensors")
    assert len(factors) == 2 * len(MODULES) * model.layers
    for layer in range(model.layers):
        first = model.adapters[f"{LAYERS}{layer}.self_attention.linear_qkv.adapter.linear_in.weight"]
        for module in ("q_proj", "k_proj", "v_proj"):
            factor = factors[f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_A.weight"]
            assert torch.equal(factor, first)
    verified_here(tmp_path / "step", peft)


def refused(code: int, model: Model, tensors: Tensors, place: Path, *more: object) -> str:
    source = step(place / "step", tensors)
    run = ckptconv_here("convert", source, place / "out", *words(model, *more))
    assert (run.code, (place / "out").exists()) == (code, False)
    return run.err


@every(
    "name, shape, told",
    [
        ("self_attention.linear_proj.adapter.weight_magnitude", (8,), "an adapter of DoRA"),
        ("mlp.experts.linear_fc1.adapter.linear_in.weight", (2, 8), "an adapter of experts"),
        ("mlp.shared_experts.linear_fc1.adapter.linear_in.weight", (2, 8), "an adapter of experts"),
        ("mlp.experts.local_experts.0.linear_fc2.adapter.linear_in.weight", (2, 8), "an adapter of experts"),
        ("mlp.router.adapter.linear_in.weight", (2, 8), "an adapter of a router"),
        ("self_attention.in_proj.adapter.linear_in.weight", (2, 8), "an adapter of the input projection"),
        ("mlp.linear_fc1.adapter.linear_out.weight_w", (8, 2), "a factor is not one matrix"),
    ],
)
def test_adapters_without_a_map_are_refused_by_name(
    name: str, shape: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    model = Model("megatron-llama")
    message = refused(5, model, {LAYERS + name: torch.zeros(model.layers, *shape)}, tmp_path)
    assert told in message
    assert name in message


def test_alpha_is_never_guessed(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    message = refused(2, model, model.stacked(), tmp_path)
    assert "PEFT needs their alpha" in message
    assert "--like DIR" in message


@every(
    "config",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"fan_in_fan_out": True},
        {"alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {"q_proj": 3}},
        {"modules_to_save": ["lm_head"]},
        {"lora_bias": True},
    ],
)
def test_a_reference_of_another_kind_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    model = Model("megatron-llama")
    like = model.shaped(tmp_path / "like", **config)
    message = refused(5, model, model.stacked(), tmp_path, "--like", like)
    assert f"contains {next(iter(config))}, but no adapter of" in message


def test_a_reference_of_another_rank_is_refused(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    like = model.shaped(tmp_path / "like", r=RANK + 1)
    message = refused(2, model, model.stacked(), tmp_path, "--like", like)
    assert f"has the rank {RANK}, but r of" in message


@every(
    "text, code, told",
    [
        (LORA.format(RANK, ALPHA), 0, "run_config.yaml specifies the same value"),
        ("model: {}\n", 0, "run_config.yaml does not mention adapters"),
        (LORA.format(RANK, ALPHA + 1), 2, f"specifies dim {RANK} and alpha {ALPHA + 1}, but"),
        (LORA.format(RANK + 1, ALPHA), 2, f"specifies dim {RANK + 1} and alpha {ALPHA}, but"),
        (LORA.format(RANK, "null"), 4, "alpha of its adapters is None, but a number was expected"),
        (
            LORA.replace("lora.LoRA", "dora.DoRA").format(RANK, ALPHA),
            5,
            "its adapters are of the class 'megatron.bridge.peft.dora",
        ),
        ("- a\n", 4, "but a mapping was expected"),
        (
            "a: !!python/object/apply:os.getcwd []\n",
            4,
            "is not valid YAML with plain values: could not determine a constructor",
        ),
        ("a: [" * 5000, 4, "is not valid YAML with plain values"),
    ],
)
def test_it_is_compared_with_what_the_training_says(text: str, code: int, told: str, tmp_path: Path) -> None:
    model = Model("megatron-llama")
    source, like = step(tmp_path / "step", model.stacked()), model.shaped(tmp_path / "like")
    (source / "run_config.yaml").write_text(text)
    run = ckptconv_here("convert", source, tmp_path / "out", *words(model, "--like", like))
    assert (run.code, (tmp_path / "out").exists()) == (code, not code)
    assert told in run.out + run.err


def test_without_pyyaml_it_is_said_that_nothing_was_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("megatron-llama")
    source = step(tmp_path / "step", model.stacked())
    (source / "run_config.yaml").write_text(LORA.format(RANK, ALPHA + 1))
    monkeypatch.setattr(run_config, "find_spec", lambda name: None)
    told = training.trained(str(source), {})
    assert (told.alpha, told.why) == (
        None,
        f"{source}/run_config.yaml was not read, because PyYAML is not installed",
    )


@pytest.mark.parametrize("lost", ["linear_in", "linear_out"])
def test_a_factor_that_is_missing_is_named(lost: str, tmp_path: Path) -> None:
    model = Model("megatron-llama")
    tensors = {name: each for name, each in model.stacked().items() if f"linear_fc2.adapter.{lost}" not in name}
    message = refused(1, model, tensors, tmp_path, "--like", model.shaped(tmp_path / "like"))
    assert f"down_proj.lora_{'A' if lost == 'linear_in' else 'B'}.weight" in message


def test_adapters_are_selected_beside_their_model(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    both = {**model.stacked(), "embedding.word_embeddings.weight": torch.zeros(4, 8)}
    like = model.shaped(tmp_path / "like")
    message = refused(2, model, both, tmp_path, "--like", like)
    assert "no rule for 1 tensor on its side 'megatron': 'embedding.word_embeddings.weight'" in message
    chosen = words(model, "--like", like, "--include", "*.adapter.*")
    done(ckptconv_here("convert", tmp_path / "step", tmp_path / "out", *chosen))
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == 2 * len(MODULES) * model.layers


def test_other_maps_are_refused(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    model.map = "megatron-gemma"
    message = refused(5, model, model.stacked(), tmp_path)
    assert "megatron-gemma does not map adapters to the names of PEFT" in message
    assert all(name in message for name in MODELS)
