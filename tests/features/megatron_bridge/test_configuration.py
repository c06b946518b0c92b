"""The configuration of transformers that run_config.yaml of a training by Megatron-Bridge says.

`data/run_configs.tar.xz` has files that Megatron-Bridge 0.3.1 and 0.6.2 wrote of configurations of tiny models.
"""

from __future__ import annotations

import functools
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cells import verified_here
from checkpoints import Run, ckptconv_here, done
from effort import every
from features.megatron_core.test_configuration import step

from ckptconv.features.megatron_bridge import run_config
from ckptconv.features.megatron_bridge.properties import arguments_of
from ckptconv.features.megatron_core.arguments import configuration
from ckptconv.options.table import OPTIONS

# The configuration of each model in transformers, and what those with experts and with latent attention have besides.
DENSE: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.0,
}  # fmt: skip
EXPECTED: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "llama+scaling": {**DENSE, "rope_scaling": SCALING},
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": {**DENSE, **EXPERTS},
    "deepseek_v3": {name: value for name, value in DENSE.items() if name != "head_dim"} | LATENT,
}
CASES = [f"{name}-{release}" for name in EXPECTED for release in ("old", "new")]
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
WITH_MAPS = pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")


@functools.cache
def texts() -> dict[str, str]:
    """The files of Megatron-Bridge, by the model and the release that wrote them."""
    with tarfile.open(Path(__file__).parent / "data/run_configs.tar.xz") as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name.removesuffix(".yaml"): file.read().decode() for name, file in files.items() if file}


def model_of(case: str) -> dict[str, Any]:
    model: dict[str, Any] = yaml.safe_load(texts()[case])["model"]
    return model


@every("case", CASES)
def test_it_is_that_of_the_model_which_was_trained(case: str) -> None:
    name = case.partition("-")[0]
    family = name.partition("+")[0]
    config, untold, _ = configuration(arguments_of(model_of(case)), f"megatron-{family}")
    assert config is not None
    assert config.pop("model_type") == family
    assert config.pop("architectures")[0].lower() == f"{family.replace('_', '')}forcausallm"
    # Megatron-Bridge 0.3.1 gives a model of transformers 5 with latent attention this scaling, if it had none.
    assert config == {**EXPECTED[name], **({"rope_scaling": YARN} if case == "deepseek_v3-old" else {})}
    assert untold == TOKENS


def test_a_model_with_its_settings_in_a_part_says_the_same() -> None:
    model = model_of("qwen3-new")
    outside = {key: model.pop(key) for key in ("seq_length", "vocab_size", "should_pad_vocab", "rotary_base")}
    apart = arguments_of({**outside, "transformer": model})
    assert configuration(apart, "megatron-qwen3") == configuration(arguments_of({**outside, **model}), "megatron-qwen3")


@every(
    "change, reason",
    [
        ({"activation_func": {"_target_": "torch.nn.functional.gelu", "_call_": False}}, "swiglu is False"),
        ({"activation_func": None}, "swiglu is False"),
        ({"gated_linear_unit": False}, "swiglu is False"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type is 'yarn'"),
        ({"qk_layernorm": False}, "qk_layernorm is False"),
        ({"layernorm_zero_centered_gamma": True}, "apply_layernorm_1p is True"),
        ({"window_size": [128, 0]}, "window_size is [128, 0]"),
        ({"softmax_type": "learnable"}, "softmax_type is 'learnable'"),
        ({"num_moe_experts": 4}, "num_experts is 4"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_attention_heads": None}, "its arguments do not specify num_attention_heads"),
    ],
)
def test_no_configuration_is_guessed(change: dict[str, Any], reason: str) -> None:
    config, _, said = configuration(arguments_of({**model_of("qwen3-new"), **change}), "megatron-qwen3")
    assert config is None
    assert reason in said


@every("change, key", [({"seq_len_interpolation_factor": 2.0}, "rope_scaling"), ({"rotary_base": None}, "rope_theta")])
def test_keys_that_it_does_not_say_are_named(change: dict[str, Any], key: str) -> None:
    config, untold, _ = configuration(arguments_of({**model_of("qwen3-new"), **change}), "megatron-qwen3")
    assert config is not None
    assert (untold, key in config) == ((key, *TOKENS), False)


def test_heads_without_groups_have_keys_of_their_own() -> None:
    config, *_ = configuration(arguments_of({**model_of("qwen3-new"), "num_query_groups": None}), "megatron-qwen3")
    assert config is not None
    assert config["num_key_value_heads"] == config["num_attention_heads"]


def trained(place: Path, text: str) -> Path:
    """A step without arguments, with an embedding of 24 rows, and with this configuration of its training."""
    saved = step(place, None)
    (saved / "run_config.yaml").write_text(text)
    return saved


def with_vocabulary(**change: Any) -> str:
    content = yaml.safe_load(texts()["qwen3-new"])
    sizes = {"hidden_size": 8, "vocab_size": 20, "tensor_model_parallel_size": 2}
    content["model"] |= {**sizes, "make_vocab_size_divisible_by": 4, **change}
    return yaml.safe_dump(content)


def converted(source: Path, out: Path, *words: str) -> tuple[Run, dict[str, Any] | None]:
    words = ("--map", "megatron-qwen3", "--copy-config", "--no-fsync", *words)
    run = done(ckptconv_here("convert", source, out, *words))
    path = out / "config.json"
    return run, json.loads(path.read_text()) if path.exists() else None


@WITH_MAPS
@every(
    "change, words, entries, untold",
    [
        ({}, (), 20, ""),
        ({"vocab_size": 24, "should_pad_vocab": False}, (), 24, ""),
        ({}, ("--size", "v=22"), 22, ""),
        ({}, ("--size", "_=1"), 23, ""),
        # The embeddings have other rows than these say, so nothing says the padding.
        ({"should_pad_vocab": False}, (), 24, ", vocab_size"),
        ({"vocab_size": 10}, (), 24, ", vocab_size"),
        ({"vocab_size": "20"}, (), 24, ", vocab_size"),
    ],
)
def test_the_vocabulary_has_no_padding(
    change: dict[str, Any], words: tuple[str, ...], entries: int, untold: str, tmp_path: Path
) -> None:
    source = trained(tmp_path / "step", with_vocabulary(**change))
    run, config = converted(source, tmp_path / "out", *words)
    assert config is not None
    assert (config["vocab_size"], config["torch_dtype"], config["tie_word_embeddings"]) == (entries, "float32", True)
    assert (
        "config.json, which --copy-config and --for-hub write, was derived from "
        f"{source}/run_config.yaml, which does not specify" in run.out
    )
    assert f"pad_token_id{untold}. Its max_position_embeddings is the sequence length of the training run." in run.out
    assert (f"left out as padding: {(24 - entries) * 8} elements" in run.err) == (entries < 24)
    verified_here(source, tmp_path / "out")


@WITH_MAPS
@every(
    "text, reason",
    [
        ("train: {}\n", "and {}/run_config.yaml describes no model with layers"),
        ("model: [1]\n", "and {}/run_config.yaml describes no model with layers"),
        ("model: {num_layers: 2}\n", "which qwen3 in transformers does not support"),
    ],
)
def test_without_a_configuration_it_is_said_why(text: str, reason: str, tmp_path: Path) -> None:
    source = trained(tmp_path / "step", text)
    run, config = converted(source, tmp_path / "out", "--size", "v=20", "--size", "q=2")
    assert config is None
    assert reason.format(source) in run.out


@WITH_MAPS
def test_arguments_of_the_step_go_first(tmp_path: Path) -> None:
    from features.megatron_core.test_configuration import ARGS

    source = step(tmp_path / "step", ARGS)
    (source / "run_config.yaml").write_text(with_vocabulary(num_layers=7))
    _, config = converted(source, tmp_path / "out")
    assert config is not None
    assert config["num_hidden_layers"] == ARGS["num_layers"]


@WITH_MAPS
@every("text", ["- a\n", "a: [" * 5000, "a: !!python/object/apply:os.getcwd []\n"])
def test_a_file_that_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    source = trained(tmp_path / "step", text)
    run = ckptconv_here("convert", source, tmp_path / "out", "--map", "megatron-qwen3")
    assert (run.code, (tmp_path / "out").exists()) == (4, False)
    assert f"{source}/run_config.yaml " in run.err


def test_without_pyyaml_it_is_said_that_it_was_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = trained(tmp_path / "step", with_vocabulary())
    monkeypatch.setattr(run_config, "find_spec", lambda name: None)
    assert run_config.run_config(str(source), {}).why == (
        f"{source}/run_config.yaml was not read, because PyYAML is not installed"
    )
