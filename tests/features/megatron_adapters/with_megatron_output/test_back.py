"""An adapter of PEFT becomes a step of Megatron-Bridge, and a step one of PEFT and again a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import verified_here
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from features.megatron_adapters.steps import ALPHA, LAYERS, MODULES, RANK, TRAINED, Model, Tensors, trained
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
    assert f"adapter_config.json was derived from {source}/run_config.yaml: lora_alpha is {ALPHA}." in run.out
    assert "has no base_model_name_or_path" in run.out
    back = tmp_path / "run/iter_0000007"
    run = ckptconv_here("convert", tmp_path / "peft", back, *words(model, *TO_STEP, "--like", source))
    done(run)
    settings = f"Train its adapters with dim {RANK}, alpha {ALPHA}, dropout 0"
    assert (
        f"{settings}, from {tmp_path}/peft/adapter_config.json: {source}/run_config.yaml specifies the same values."
        in run.out
    )
    assert_same(held(back), model.stacked())
    assert (back / "run_config.yaml").read_text() == TRAINED
    done(ckptconv_here("convert", back, tmp_path / "again", *words(model)))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "peft" / file).read_bytes()
    verified_here(source, tmp_path / "peft")
    verified_here(tmp_path / "peft", back, "--map", model.map, "--like", source)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def whole(tensors: Tensors) -> Tensors:
    return tensors


@every(
    "config, step_of, more, told",
    [
        ({"lora_alpha": ALPHA + 1}, whole, "", "specifies dim 2, alpha 5, dropout 0, but adapter_config.json of"),
        ({"lora_dropout": 0.5}, whole, "", "specifies dim 2, alpha 5, dropout 0.5."),
        ({}, whole, "  target_modules: ['*.layers.0.*.linear_*', linear_proj]\n", "layers.1.mlp.linear_fc1"),
        ({}, without("linear_fc2"), "", "layers.0.mlp.linear_fc2.adapter.linear_in.weight ("),
        ({}, without(".adapter."), "", " and none)"),
        ({}, lambda tensors: {name: tensor[..., :1] for name, tensor in tensors.items()}, "", ", 1))"),
        ({"use_rslora": True}, whole, "", "use_rslora, which no adapter of Megatron-Bridge has"),
        ({"modules_to_save": ["lm_head"]}, whole, "", "modules_to_save, which no adapter of Megatron-Bridge has"),
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
    assert f"dim {RANK}, alpha {ALPHA}, dropout 0, from {tmp_path}/peft/adapter_config.json: the step" in run.out
    assert "No arguments were written, because they require embeddings and a config.json" in run.out
    assert len(held(tmp_path / "out/release")) == len(model.stacked())


@every(
    "lost, to, code, told",
    [
        ("k_proj.lora_A", "megatron", 2, "k_proj.lora_A.weight', which is missing"),
        ("layers.1.", "megatron", 5, "has adapters of 1 layer, but its model has 2 layers"),
        ("", "megatron-fsdp", 5, "contains adapters, but megatron-fsdp supports models only"),
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


# The parts of matrices that Megatron-core joins, by PEFT's names of modules, as CanonicalLoRA calls them.
PARTS = {
    **{f"{part}_proj": f"self_attention.linear_qkv.adapter.adapter_{part}" for part in "qkv"},
    **{f"{part}_proj": f"mlp.linear_fc1.adapter.adapter_{part}" for part in ("gate", "up")},
    "o_proj": "self_attention.linear_proj.adapter",
    "down_proj": "mlp.linear_fc2.adapter",
}


def own(model: Model, place: Path, modules: tuple[str, ...] = MODULES) -> Path:
    """An adapter of PEFT as a training gives it: each module has factors of its own."""
    file = model.shaped(place, modules) / "adapter_model.safetensors"
    torch.manual_seed(3)
    save_file({name: torch.randn(factor.shape) for name, factor in load_file(file).items()}, file)
    return place


def canonical(model: Model, factors: Tensors, ranks: int) -> Tensors:
    """These factors as Megatron-Bridge stores them: of each rank's rows of gate and up, first the upper halves."""
    step = {}
    for module, part in PARTS.items():
        if not any(f".{module}." in name for name in factors):
            continue
        above = "self_attn" if "attention" in part else "mlp"
        for factor, end in (("lora_A", "in"), ("lora_B", "out")):
            names = (f"base_model.model.model.layers.{at}.{above}.{module}.{factor}" for at in range(model.layers))
            layers = [factors[f"{name}.weight"] for name in names]
            if factor == "lora_B" and "fc1" in part:
                layers = [
                    torch.cat([half for at in (0, 1) for half in layer.chunk(2 * ranks)[at::2]]) for layer in layers
                ]
            step[f"{LAYERS}{part}.linear_{end}.weight"] = torch.stack(layers)
    return step


def settings(ranks: int | None) -> str:
    """The configuration of a training of such adapters on so many tensor-parallel ranks."""
    modules = "linear_q, linear_k, linear_v, linear_proj, linear_fc1_up, linear_fc1_gate, linear_fc2"
    # Sets as Megatron-Bridge writes them.
    sets = "  canonical_mapping:\n    linear_qkv: !!set\n      linear_q: null\n"
    sets += "  params_to_save: !!set\n    decoder.layers.0.mlp.linear_fc2.adapter.linear_in.weight: null\n"
    text = TRAINED.replace("lora.LoRA", "canonical_lora.CanonicalLoRA").replace("  canonical_mapping: {}\n", sets)
    text += f"  target_modules: [{modules}]\n"
    return text.replace("model:\n", f"model:\n  tensor_model_parallel_size: {ranks}\n") if ranks else text


@every("name, ranks", [(MODELS[0], 1), (MODELS[1], 2), (MODELS[2], 2)])
def test_factors_of_each_module_become_canonical_lora_and_come_back(name: str, ranks: int, tmp_path: Path) -> None:
    model = Model(name)
    peft = own(model, tmp_path / "peft")
    size = ("--size", f"t={ranks}") if ranks > 1 else ()
    back = tmp_path / "run/iter_0000007"
    run = done(ckptconv_here("convert", peft, back, *words(model, *TO_STEP, *size)))
    assert f"The adapters have the form CanonicalLoRA, for {ranks} tensor-parallel rank" in run.out
    factors = load_file(peft / "adapter_model.safetensors")
    assert_same(held(back), canonical(model, factors, ranks))
    verified_here(peft, back, "--map", model.map, *size)
    (back / "run_config.yaml").write_text(settings(ranks))
    done(ckptconv_here("convert", back, tmp_path / "again", *words(model)))
    assert_same(load_file(tmp_path / "again/adapter_model.safetensors"), factors)
    verified_here(back, tmp_path / "again")


def with_zeros(model: Model, factors: Tensors, modules: tuple[str, ...]) -> Tensors:
    """These factors, and zeros for those of other modules among these."""
    shapes = {}
    for name, weight in model.hf.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if module.endswith(modules):
            shapes |= {f"{module}.lora_A.weight": (RANK, weight.shape[1])}
            shapes |= {f"{module}.lora_B.weight": (weight.shape[0], RANK)}
    return {name: factors.get(name, torch.zeros(shape)) for name, shape in shapes.items()}


@every(
    "name, adapted, needed",
    [
        (MODELS[0], ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")),
        (MODELS[1], ("k_proj",), ("q_proj", "k_proj", "v_proj")),
        (MODELS[2], ("q_proj", "o_proj", "up_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")),
        (MODELS[2], ("down_proj",), ("down_proj",)),
    ],
)
def test_modules_that_are_not_adapted_have_zeros_in_a_step_and_none_afterwards(
    name: str, adapted: tuple[str, ...], needed: tuple[str, ...], tmp_path: Path
) -> None:
    model = Model(name)
    peft = own(model, tmp_path / "peft", adapted)
    factors = load_file(peft / "adapter_model.safetensors")
    back = tmp_path / "run/iter_0000007"
    run = done(ckptconv_here("convert", peft, back, *words(model, *TO_STEP)))
    zeros = sorted({*needed} - {*adapted})
    assert (f"{peft} does not adapt {', '.join(zeros)}, but Megatron-Bridge needs" in run.out) == bool(zeros)
    expected = canonical(model, with_zeros(model, factors, needed), 1)
    assert_same(held(back), expected)
    verified_here(peft, back, "--map", model.map)
    (back / "run_config.yaml").write_text(settings(1))
    run = done(ckptconv_here("convert", back, tmp_path / "again", *words(model)))
    assert (f"the adapters of {', '.join(zeros)}." in run.out) == bool(zeros)
    assert_same(load_file(tmp_path / "again/adapter_model.safetensors"), factors)
    assert json.loads((tmp_path / "again/adapter_config.json").read_text())["target_modules"] == sorted(adapted)
    verified_here(back, tmp_path / "again")


def test_factors_of_zeros_are_kept_where_the_adapter_to_be_like_has_them(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    attention = ("q_proj", "k_proj", "v_proj")
    factors = load_file(own(model, tmp_path / "peft", attention[::2]) / "adapter_model.safetensors")
    every_one = with_zeros(model, factors, attention)
    step = trained(tmp_path / "step", canonical(model, every_one, 1), text=settings(1))
    for modules, expected in ((attention, every_one), (attention[::2], factors)):
        like = model.shaped(tmp_path / f"like-{len(modules)}", modules)
        out = tmp_path / f"out-{len(modules)}"
        done(ckptconv_here("convert", step, out, *words(model, "--like", like)))
        assert_same(load_file(out / "adapter_model.safetensors"), expected)


def test_rows_of_a_module_that_is_not_adapted_are_never_guessed(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    for adapted, shapes_say_it in (("q_proj", False), ("k_proj", False), ("up_proj", True)):
        peft, out = own(model, tmp_path / adapted, (adapted,)), tmp_path / f"out-{adapted}"
        run = ckptconv_here("convert", peft, out, "--map", model.map, *TO_STEP, "--no-fsync")
        assert (run.code, out.exists()) == ((0, True) if shapes_say_it else (2, False))
        assert ("does not follow from the shapes" in run.err, "--config FILE" in run.err) == (not shapes_say_it,) * 2


def test_a_part_with_one_factor_of_zeros_is_no_zero(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    file = own(model, tmp_path / "peft") / "adapter_model.safetensors"
    # As an adapter begins: the second factor is zero, and the first is not.
    factors = {name: factor * (".k_proj.lora_B" not in name) for name, factor in load_file(file).items()}
    # Its first bytes are zeros.
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    factors = {**factors, name: torch.zeros_like(factors[name])}
    factors[name][-1, -1] = 1
    factors[name.replace("lora_A", "lora_B")][:] = 0
    step = trained(tmp_path / "step", canonical(model, factors, 1), text=settings(1))
    run = done(ckptconv_here("convert", step, tmp_path / "out", *words(model)))
    assert_same(load_file(tmp_path / "out/adapter_model.safetensors"), factors)
    assert "Left out" not in run.out


def test_a_step_of_lora_has_no_place_for_modules_that_are_not_adapted(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    peft = own(model, tmp_path / "peft", ("q_proj", "v_proj"))
    like = trained(tmp_path / "like", model.stacked())
    run = ckptconv_here("convert", peft, tmp_path / "out", *words(model, *TO_STEP, "--like", like))
    assert (run.code, (tmp_path / "out").exists()) == (2, False)
    assert (
        f"has no adapters of k_proj, but {like} is a LoRA step, which adapts these modules together with others"
        in run.err
    )


def test_the_form_is_that_of_the_step_to_be_like(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    shared = equal(model, tmp_path / "shared")
    factors = load_file(shared / "adapter_model.safetensors")
    like = trained(tmp_path / "like", canonical(model, factors, 2), text=settings(2))
    run = done(ckptconv_here("convert", shared, tmp_path / "out", *words(model, *TO_STEP, "--like", like)))
    assert "CanonicalLoRA, for 2 tensor-parallel ranks" in run.out
    assert_same(held(tmp_path / "out/release"), canonical(model, factors, 2))
    assert (tmp_path / "out/release/run_config.yaml").read_text() == settings(2)
    joined = trained(tmp_path / "joined", model.stacked())
    run = ckptconv_here(
        "convert", own(model, tmp_path / "own"), tmp_path / "no", *words(model, *TO_STEP, "--like", joined)
    )
    assert (run.code, (tmp_path / "no").exists()) == (4, False)
    assert "linear_fc1.adapter.linear_in.weight' is stored twice" in run.err
    assert "Use --like with a step of CanonicalLoRA" in run.err


@every(
    "ranks, size, told",
    [
        (None, (), "does not record the number of tensor-parallel ranks"),
        (2, ("--size", "t=4"), "specifies 2 tensor-parallel ranks, but --size specifies t=4"),
    ],
)
def test_the_number_of_ranks_is_never_guessed(
    ranks: int | None, size: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    model = Model("megatron-llama")
    factors = load_file(own(model, tmp_path / "peft") / "adapter_model.safetensors")
    source = trained(tmp_path / "step", canonical(model, factors, 2), text=settings(ranks))
    run = ckptconv_here("convert", source, tmp_path / "out", *words(model, *size))
    assert (run.code, (tmp_path / "out").exists()) == (2, False)
    assert told in run.err


def test_modules_that_the_training_does_not_adapt_are_refused(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    factors = load_file(own(model, tmp_path / "peft") / "adapter_model.safetensors")
    text = settings(1).replace("linear_fc1_gate, ", "")
    like = trained(tmp_path / "like", canonical(model, factors, 1), text=text)
    run = ckptconv_here("convert", tmp_path / "peft", tmp_path / "out", *words(model, *TO_STEP, "--like", like))
    assert (run.code, (tmp_path / "out").exists()) == (2, False)
    assert "adapts decoder.layers.0.mlp.linear_fc1_gate" in run.err


def test_first_factors_that_differ_have_no_place_in_a_step_of_lora(tmp_path: Path) -> None:
    model = Model("megatron-llama")
    file = equal(model, tmp_path / "peft") / "adapter_model.safetensors"
    factors = load_file(file)
    factors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"] += 1
    save_file(factors, file)
    like = trained(tmp_path / "like", model.stacked())
    run = ckptconv_here("convert", file.parent, tmp_path / "out", *words(model, *TO_STEP, "--like", like))
    assert (run.code, (tmp_path / "out").exists()) == (4, False)
    assert f"'{LAYERS}1.mlp.linear_fc1.adapter.linear_in.weight' is stored twice" in run.err
