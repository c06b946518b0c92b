"""The configuration of transformers that the arguments of a training in Megatron-LM say."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import verified_here
from checkpoints import Run, ckptconv_here, done
from effort import every
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptconv.features.megatron_core.arguments import EMBEDDINGS, HEAD, configuration, scaling_arguments
from ckptconv.options.table import OPTIONS

ARGS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 2, "num_query_groups": 1,
    "group_query_attention": True, "kv_channels": 4, "max_position_embeddings": 32, "norm_epsilon": 1e-6,
    "rotary_base": 10000, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "rotary_percent": 1.0, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True, "num_experts": None,
    "padded_vocab_size": 24, "vocab_size": 20,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 6, "moe_layer_freq": [0, 1],
    "moe_router_pre_softmax": False, "moe_router_score_function": "softmax",
}  # fmt: skip
LATENT: dict[str, Any] = {
    **EXPERTS, "multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 4, "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2, "v_head_dim": 4, "moe_shared_expert_intermediate_size": 12, "rope_type": "rope",
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None, "rotary_scaling_factor": 1.0,
    "mscale": 1.0, "mscale_all_dim": 0.0,
}  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def test_layers_without_experts_are_named() -> None:
    config, untold, _ = configuration({**ARGS, **EXPERTS}, "megatron-qwen3_moe")
    assert config is not None
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (4, 2, 6)
    assert (config["mlp_only_layers"], config["norm_topk_prob"], untold) == ([0], True, TOKENS)
    every_third, _, _ = configuration({**ARGS, **EXPERTS, "num_layers": 7, "moe_layer_freq": 3}, "megatron-qwen3_moe")
    assert every_third is not None
    assert every_third["mlp_only_layers"] == [1, 2, 4, 5]


def test_arguments_that_are_none_have_the_meaning_of_megatron() -> None:
    config, untold, _ = configuration({**ARGS, **LATENT}, "megatron-deepseek_v3")
    assert config is not None
    assert (config["q_lora_rank"], config["n_group"], config["topk_group"]) == (None, 1, 1)
    assert (config["routed_scaling_factor"], config["n_shared_experts"], config["first_k_dense_replace"]) == (1.0, 2, 1)
    assert (config["num_key_value_heads"], "head_dim" in config, untold) == (2, False, TOKENS)
    without_groups, _, _ = configuration({**ARGS, "group_query_attention": False}, "megatron-qwen3")
    assert without_groups is not None
    assert without_groups["num_key_value_heads"] == 2
    sparse = {**ARGS, **EXPERTS, "qk_layernorm": False, "moe_layer_freq": 1, "moe_ffn_hidden_size": None}
    mixtral, untold, _ = configuration(sparse, "megatron-mixtral")
    assert mixtral is not None
    assert (mixtral["intermediate_size"], "moe_intermediate_size" in mixtral, untold) == (12, False, TOKENS)


# The configuration of Llama 3.1 in transformers, but for the factor.
SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@every(
    "map_name, change, key",
    [
        ("megatron-qwen3", {"max_position_embeddings": None}, "max_position_embeddings"),
        ("megatron-qwen3", {"use_rope_scaling": True, "rope_scaling_factor": None}, "rope_scaling"),
        ("megatron-qwen3", {"rotary_seq_len_interpolation_factor": 2}, "rope_scaling"),
        # Releases before 0.14, which have no argument rope_type, scale latent attention otherwise.
        ("megatron-deepseek_v3", {key: value for key, value in LATENT.items() if key != "rope_type"}, "rope_scaling"),
        ("megatron-deepseek_v3", {**LATENT, "mscale": None}, "rope_scaling"),
        ("megatron-deepseek_v3", {**LATENT, "rotary_scaling_factor": float("nan")}, "rope_scaling"),
        ("megatron-deepseek_v3", {**LATENT, "rope_type": "yarn", "rotary_scaling_factor": 0.5}, "rope_scaling"),
    ],
)
def test_keys_that_no_argument_says_are_named(map_name: str, change: dict[str, Any], key: str) -> None:
    config, untold, _ = configuration({**ARGS, **change}, map_name)
    assert config is not None
    assert (untold, key in config) == ((key, *TOKENS), False)


@every("change, factor", [({}, 8.0), ({"rope_scaling_factor": 32}, 32.0)])
def test_scaled_rotary_embeddings_are_those_of_llama_3(change: dict[str, Any], factor: float) -> None:
    scaled = {**ARGS, "qk_layernorm": False, "use_rope_scaling": True, **change}
    config, untold, _ = configuration(scaled, "megatron-llama")
    assert config is not None
    assert (config["rope_scaling"], untold) == ({**SCALING, "factor": factor}, TOKENS)


def scaling_of(change: dict[str, Any]) -> Any:
    """How rotary embeddings of a model with latent attention are scaled, if they are; everything else is told."""
    config, untold, _ = configuration({**ARGS, **LATENT, **change}, "megatron-deepseek_v3")
    assert config is not None
    assert untold == TOKENS
    return config.get("rope_scaling")


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


@every(
    "mscale, all_dim, further",
    [
        (1.0, 1.0, {}),
        (0.707, 1.0, {}),
        (1.0, 0.0, {}),
        # transformers heeds mscale with mscale_all_dim only.
        (0.5, 0.0, {"attention_factor": 0.1 * 0.5 * math.log(40) + 1}),
        (0, 1.0, {"attention_factor": 1 / (0.1 * math.log(40) + 1)}),
    ],
)
def test_latent_attention_is_scaled_by_yarn(mscale: float, all_dim: float, further: dict[str, float]) -> None:
    numbers = {"rotary_scaling_factor": 40.0, "mscale": mscale, "mscale_all_dim": all_dim}
    expected = {**YARN, "mscale": mscale, "mscale_all_dim": all_dim, **further}
    # Without a type, Megatron-core scales latent attention by YaRN.
    for rope_type in ("yarn", None):
        assert scaling_of({"rope_type": rope_type, **numbers}) == expected
    own = {"original_max_position_embeddings": 512, "beta_fast": 8, "beta_slow": 2}
    assert scaling_of({"rope_type": "yarn", **numbers, **own}) == {**expected, **own}


@every("change", [{"rope_type": "yarn"}, {"rotary_scaling_factor": 40.0}, {"mscale_all_dim": 1.0}])
def test_latent_attention_without_a_factor_is_not_scaled(change: dict[str, Any]) -> None:
    assert scaling_of(change) is None
    # GPTModel scales no rotary embeddings of latent attention.
    assert scaling_of({**change, "use_rope_scaling": True}) is None


@every("base, all_dim", [(10000, 1.0), (500000.0, 0.707), (10, 2.0)])
def test_a_softmax_that_alone_is_scaled_has_a_yarn_that_changes_no_frequency(base: float, all_dim: float) -> None:
    numbers = {"rotary_scaling_factor": 40.0, "mscale": 0.5, "mscale_all_dim": all_dim}
    scaling = scaling_of({"rope_type": "rope", "rotary_base": base, **numbers})
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 40.0)
    # Their ratio scales cosines and sines, mscale_all_dim the softmax.
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (all_dim, all_dim)
    assert "attention_factor" not in scaling
    for width in (4, 8, 64, 128):
        turns = [scaling["original_max_position_embeddings"] / (scaling[key] * 2 * math.pi) for key in BOUNDS]
        low, high = (width * math.log(turn) / (2 * math.log(base)) for turn in turns)
        # As in YaRN, frequencies are interpolated from `low` on, and those of a head are half as many as its width.
        assert width // 2 - 1 <= math.floor(low) <= min(math.ceil(high), width - 1)


BOUNDS = ("beta_fast", "beta_slow")
# As DeepSeek V3 says it.
OWN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in OWN.items() if key not in keys}


@every(
    "rope",
    [
        OWN,
        {**OWN, "rope_theta": 10000.0, "rope_type": "yarn"},
        without("beta_fast", "beta_slow"),
        # Without mscale_all_dim, transformers heeds no mscale.
        without("mscale", "mscale_all_dim"),
        {**without("mscale"), "mscale_all_dim": 0},
        {**OWN, "mscale": 0.5, "mscale_all_dim": 0, "attention_factor": 0.1 * 0.5 * math.log(40) + 1},
    ],
)
def test_arguments_say_the_yarn_of_a_configuration(rope: dict[str, Any]) -> None:
    args = scaling_arguments(rope, is_latent=True)
    assert args is not None
    assert (args["rope_type"], args["rotary_scaling_factor"]) == ("yarn", 40)
    assert args.keys() == {"rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"}
    back = scaling_of(args)
    filled = {"mscale": 1.0, "mscale_all_dim": 0.0} if "mscale" not in rope else {}
    assert back == {**YARN, **filled, **{key: rope[key] for key in rope if key not in ("type", "rope_theta")}}


@every(
    "rope",
    [
        # No argument of Megatron-LM says these.
        {**OWN, "beta_fast": 1},
        {**OWN, "original_max_position_embeddings": 8192},
        without("original_max_position_embeddings"),
        {**OWN, "truncate": False},
        {**OWN, "attention_factor": 1.5},
        # Megatron-core heeds these, and transformers does not.
        without("mscale"),
        {**without("mscale_all_dim"), "mscale": 0.5},
        {**OWN, "factor": None},
        {**OWN, "factor": "40"},
        {**OWN, "factor": 0.5},
        {**OWN, "type": "linear"},
        {"full_attention": OWN},
        [OWN],
    ],
)
def test_no_arguments_are_guessed(rope: Any) -> None:
    assert scaling_arguments(rope, is_latent=True) is None
    assert scaling_arguments(rope, is_latent=False) is None


def test_a_configuration_without_scaling_has_arguments_that_say_so() -> None:
    for rope in ({}, {"rope_type": "default", "rope_theta": 10000.0}):
        args = scaling_arguments(rope, is_latent=True)
        assert args is not None
        assert scaling_of(args) is None
        assert scaling_arguments(rope, is_latent=False) == {}


@every(
    "map_name, change, reason",
    [
        ("megatron-gemma2", {}, "the map megatron-gemma2 does not specify a model"),
        ("megatron-qwen3", {"num_attention_heads": None}, "its arguments do not specify num_attention_heads"),
        ("megatron-qwen3", {"swiglu": False}, "swiglu is False, which qwen3"),
        ("megatron-qwen3", {"rotary_base": float("nan")}, "rotary_base is nan"),
        ("megatron-qwen3", {"num_layers": "2"}, "num_layers is '2'"),
        ("megatron-qwen3", EXPERTS, "num_experts is 4"),
        ("megatron-qwen3", {"add_bias_linear": True}, "add_bias_linear is True"),
        ("megatron-qwen3_moe", {}, "num_experts is None"),
        ("megatron-qwen3_moe", {**EXPERTS, "moe_shared_expert_intermediate_size": 6}, "in 1 of 2 layers"),
        ("megatron-qwen3_moe", {**EXPERTS, "moe_layer_freq": "[1]*2"}, "in 0 of 2 layers"),
        ("megatron-mixtral", {**EXPERTS, "qk_layernorm": False}, "in 1 of 2 layers"),
        ("megatron-deepseek_v3", {**LATENT, "moe_shared_expert_intermediate_size": 7}, "in 1 of 2 layers"),
        ("megatron-deepseek_v3", {**LATENT, "moe_layer_freq": [1, 0]}, "do not come first"),
    ],
)
def test_no_configuration_is_guessed(map_name: str, change: dict[str, Any], reason: str) -> None:
    config, _, said = configuration({**ARGS, **change}, map_name)
    assert config is None
    assert reason in said


def step(place: Path, args: dict[str, Any] | None, names: tuple[str, ...] = (EMBEDDINGS,)) -> Path:
    """A step of Megatron-core with an embedding of 24 rows, or tensors of these `names`, and common.pt with these
    arguments."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    weights = {name: torch.ones(24, 8) for name in names}
    dcp.save(weights, checkpoint_id=place, planner=planner, no_dist=True)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    common = {"iteration": 1, "checkpoint_version": 3.0} | ({"args": Namespace(**args)} if args else {})
    torch.save(common, place / "common.pt")
    return place


def converted(source: Path, out: Path, *words: str) -> tuple[Run, dict[str, Any] | None]:
    run = done(ckptconv_here("convert", source, out, "--no-fsync", "--copy-config", *words))
    path = out / "config.json"
    return run, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
@every("sizes, entries", [((), 20), (("--size", "v=22"), 22), (("--size", "_=1"), 23)])
def test_the_vocabulary_has_no_padding(sizes: tuple[str, ...], entries: int, tmp_path: Path) -> None:
    run, config = converted(step(tmp_path / "step", ARGS), tmp_path / "out", "--map", "megatron-qwen3", *sizes)
    assert config is not None
    assert (config["vocab_size"], config["torch_dtype"], config["tie_word_embeddings"]) == (entries, "float32", True)
    assert "which do not specify bos_token_id, eos_token_id, pad_token_id." in run.out
    verified_here(tmp_path / "step", tmp_path / "out")


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_a_prefix_that_options_remove_hides_neither_head_nor_vocabulary(tmp_path: Path) -> None:
    named = (f"module.{EMBEDDINGS}", f"module.{HEAD}")
    for number, words in enumerate((("--strip-prefix", "module."), ("--rename", r"^module\.="))):
        place = step(tmp_path / f"step{number}", ARGS, named)
        _, config = converted(place, tmp_path / f"out{number}", "--map", "megatron-qwen3", *words)
        assert config is not None
        assert (config["vocab_size"], config["tie_word_embeddings"]) == (20, False)


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_no_configuration_follows_from_tensors_without_an_embedding(tmp_path: Path) -> None:
    place = step(tmp_path / "step", ARGS, ("e",))
    words = ("--map", "megatron-qwen3", "--rename", f"^e$={EMBEDDINGS}", "--size", "v=24")
    run, config = converted(place, tmp_path / "out", *words)
    assert config is None
    assert f"no tensors are called {EMBEDDINGS}" in run.out


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_a_configuration_next_to_the_step_goes_first(tmp_path: Path) -> None:
    own = {"vocab_size": 21, "hidden_size": 8}
    (step(tmp_path / "step", ARGS) / "config.json").write_text(json.dumps(own))
    _, config = converted(tmp_path / "step", tmp_path / "out", "--map", "megatron-qwen3")
    assert config == own


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
@every(
    "args, map_name, reason",
    [
        (None, "megatron-qwen3", "it has no arguments of Megatron-LM"),
        ({**ARGS, "swiglu": False}, "megatron-qwen3", "its arguments include swiglu is False"),
        (ARGS, "megatron-gemma2", "the map megatron-gemma2 does not specify a model of transformers"),
    ],
)
def test_without_a_configuration_it_is_said_why(
    args: dict[str, Any] | None, map_name: str, reason: str, tmp_path: Path
) -> None:
    source = step(tmp_path / "step", args)
    run, config = converted(source, tmp_path / "out", "--map", map_name, "--size", "v=20", "--size", "q=2")
    assert config is None
    assert reason in run.out


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_a_cast_changes_the_dtype(tmp_path: Path) -> None:
    words = ("--map", "megatron-qwen3", "--dtype", "bf16", "--for-hub")
    _, config = converted(step(tmp_path / "step", ARGS), tmp_path / "out", *words)
    assert config is not None
    assert config["torch_dtype"] == "bfloat16"


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_without_being_asked_for_none_is_written(tmp_path: Path) -> None:
    source = step(tmp_path / "step", ARGS)
    run = done(ckptconv_here("convert", source, tmp_path / "out", "--map", "megatron-qwen3", "--no-fsync"))
    assert "config.json, which --copy-config and --for-hub write, was derived from" in run.out
    assert not (tmp_path / "out/config.json").exists()
