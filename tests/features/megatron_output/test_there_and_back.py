"""A model of transformers becomes a step of Megatron-core, and a model of transformers again, with its configuration.

The models are those that the frameworks' own converters made for the tests of maps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import VERIFY, verified_here
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from safetensors.torch import load_file

from ckptconv.options.table import OPTIONS

DATA = Path(__file__).parents[1] / "maps" / "data"
pytestmark = pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
# Keys that no argument says, and that follow from the family: they do not come back.
LOST = {"attention_dropout", "torch_dtype", "sliding_window", "attention_bias", "head_dim"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def model(name: str, place: Path) -> Path:
    place.mkdir()
    shutil.copy(DATA / f"megatron-{name}/config.json", place)
    shutil.copy(DATA / f"megatron-{name}/hf.safetensors", place / "model.safetensors")
    return place


@every("name", CLASSES)
def test_the_configuration_comes_back_with_the_tensors(name: str, tmp_path: Path) -> None:
    source = model(name, tmp_path / "hf")
    words = ("--map", f"megatron-{name}", "--no-fsync", "--quiet")
    done(ckptconv_here("convert", source, tmp_path / "run", *words, "--to", "megatron", "--size", "_=3"))
    done(ckptconv_here("convert", tmp_path / "run", tmp_path / "back", *words, "--copy-config", *VERIFY))
    verified_here(tmp_path / "run", tmp_path / "back")
    config = json.loads((source / "config.json").read_text())
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert (back["model_type"], back["architectures"]) == (name, [CLASSES[name]])
    expected = {key: value for key, value in config.items() if key not in LOST}
    assert {key: back.get(key) for key in expected} == expected
    tensors = load_file(source / "model.safetensors")
    assert_same(load_file(tmp_path / "back/model.safetensors"), tensors)
    assert back["tie_word_embeddings"] == ("lm_head.weight" not in tensors)
    assert back["torch_dtype"] == str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")


def test_parameters_without_states_get_zeros_before_a_map_joins_them(tmp_path: Path) -> None:
    source = model("llama", tmp_path / "hf")
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    without = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    states = {
        name: {"step": torch.tensor(3.0), "exp_avg": tensor * 2, "exp_avg_sq": tensor * tensor}
        for name, tensor in weights.items()
        if name not in without
    }
    vectors = [[name for name, tensor in weights.items() if (tensor.dim() == 1) == flag] for flag in (False, True)]
    groups = [{"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.0, "params": names} for names in vectors]
    path = tmp_path / "hf/train.pt"
    torch.save({"model": weights, "optimizer": {"state": states, "param_groups": groups}}, path)
    words = ("convert", path, tmp_path / "run/iter_0000003", "--to", "megatron", "--key", "model", "--states", path)
    words = (*words, "--map", "megatron-llama", "--size", "_=0", "--no-fsync")
    refused = ckptconv_here(*words)
    assert (refused.code, "not both exist for" in refused.err) == (5, True)
    run = done(ckptconv_here(*words, "--fill-states", *VERIFY))
    assert all(name in run.err for name in without)
    described = dcp.FileSystemReader(tmp_path / "run/iter_0000003").read_metadata().state_dict_metadata
    key = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    state = {key: torch.ones(described[key].size)}
    dcp.load(state, checkpoint_id=tmp_path / "run/iter_0000003", no_dist=True)
    assert [bool(layer.any()) for layer in state[key]] == [False] + [True] * (len(state[key]) - 1)
