"""Steps of Megatron-core as outputs: what torch's own reader and ours find in them, and what is refused."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from safetensors.torch import load_file, save_file

LAYERS, EXPERTS, HIDDEN, ROWS = 3, 2, 8, 20
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_qkv.weight": (16, HIDDEN),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    "mlp.linear_fc1.weight": (24, HIDDEN),
    "mlp.linear_fc2.weight": (HIDDEN, 12),
}
SPARSE = {
    "pre_mlp_layernorm.weight": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN),
    **{f"mlp.experts.linear_fc1.weight{number}": (12, HIDDEN) for number in range(EXPERTS)},
    **{f"mlp.experts.linear_fc2.weight{number}": (HIDDEN, 6) for number in range(EXPERTS)},
}
CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 18, "rope_theta": 5000.0}
QUIETLY = ("--to", "megatron", "--no-fsync", "--quiet")


def model(*kinds: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The parameters of a model with layers of these kinds, under the names of Transformer Engine's layers."""
    shapes = {
        "embedding.word_embeddings.weight": (ROWS, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (ROWS, HIDDEN),
    }
    for number, kind in enumerate(kinds):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in {**ATTENTION, **kind}.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def saved(place: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any] | None = CONFIG) -> Path:
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    return place


def loaded(step: Path) -> dict[str, torch.Tensor]:
    """The tensors that torch's own reader finds in a step."""
    described = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in described.items()
        if hasattr(each, "size")
    }
    dcp.load(tensors, checkpoint_id=step, no_dist=True)
    return tensors


def stacked(tensors: Mapping[str, torch.Tensor], suffix: str) -> torch.Tensor:
    return torch.stack([tensors[f"decoder.layers.{layer}.{suffix}"] for layer in range(LAYERS)])


# ------------------------------------------------------------------------------------------------------------- layout


def test_equal_layers_are_one_tensor_with_a_chunk_for_each(tmp_path: Path) -> None:
    tensors = model(*[DENSE] * LAYERS)
    done(ckptconv_here("convert", saved(tmp_path / "model", tensors), tmp_path / "run", *QUIETLY, "--verify"))
    step = tmp_path / "run" / "release"
    found = loaded(step)
    whole = [name for name in tensors if ".layers." not in name]
    suffixes = [*ATTENTION, *DENSE]
    expected = {name: tensors[name] for name in whole}
    expected |= {f"decoder.layers.{suffix}": stacked(tensors, suffix) for suffix in suffixes}
    assert_same(found, expected)
    metadata = dcp.FileSystemReader(step).read_metadata()
    chunks = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(1, 24, HIDDEN)] * LAYERS
    assert not metadata.planner_data
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((step / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
    }


def test_experts_are_one_tensor_with_a_chunk_for_each(tmp_path: Path) -> None:
    tensors = model(*[SPARSE] * LAYERS)
    done(ckptconv_here("convert", saved(tmp_path / "model", tensors), tmp_path / "run", *QUIETLY, "--chunks", "2"))
    step = tmp_path / "run" / "release"
    found = loaded(step)["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert torch.equal(
                found[layer, expert], tensors[f"decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}"]
            )
    metadata = dcp.FileSystemReader(step).read_metadata()
    chunks = metadata.state_dict_metadata["decoder.layers.mlp.experts.experts.linear_fc2.weight"].chunks
    assert {tuple(chunk.sizes) for chunk in chunks} == {(1, 1, HIDDEN // 2, 6)}
    assert {path.name for path in step.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


@every("to, norm", [("megatron", "mlp.linear_fc1.layer_norm"), ("megatron-te", "pre_mlp_layernorm")])
def test_layers_of_several_kinds_keep_their_numbers(to: str, norm: str, tmp_path: Path) -> None:
    tensors = model(DENSE, SPARSE)
    source = saved(tmp_path / "model", tensors)
    done(ckptconv_here("convert", source, tmp_path / "run", "--to", to, "--no-fsync", "--quiet"))
    found = loaded(tmp_path / "run" / "release")
    assert torch.equal(
        found["decoder.layers.0.mlp.linear_fc1.weight"], tensors["decoder.layers.0.mlp.linear_fc1.weight"]
    )
    joined = "_" if norm.endswith("layer_norm") else "."
    assert torch.equal(
        found[f"decoder.layers.1.{norm}{joined}weight"], tensors["decoder.layers.1.pre_mlp_layernorm.weight"]
    )
    assert found["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (EXPERTS, 12, HIDDEN)


def test_modules_with_a_matrix_have_an_empty_object(tmp_path: Path) -> None:
    done(ckptconv_here("convert", saved(tmp_path / "model", model(*[SPARSE] * 2)), tmp_path / "run", *QUIETLY))
    described = dcp.FileSystemReader(tmp_path / "run/release").read_metadata().state_dict_metadata
    objects = {name for name, each in described.items() if not hasattr(each, "size")}
    attention, mlp = "decoder.layers.self_attention.linear", "decoder.layers.mlp.experts.experts.linear"
    layers = [f"shard_{layer}_2" for layer in range(2)]
    experts = [f"shard_{layer}.{expert}_2.{EXPERTS}" for layer in range(2) for expert in range(EXPERTS)]
    assert objects == {
        *(f"{attention}_{name}._extra_state/{layer}" for name in ("qkv", "proj") for layer in layers),
        *(f"{mlp}_{name}._extra_state/{expert}" for name in ("fc1", "fc2") for expert in experts),
    }
    key = f"decoder.layers.self_attention.linear_qkv._extra_state/{layers[0]}"
    state: dict[str, Any] = {key: None}
    dcp.load(state, checkpoint_id=tmp_path / "run/release", no_dist=True)
    assert state == {key: [None]}


# -------------------------------------------------------------------------------------------------- arguments and step


def test_arguments_follow_from_the_configuration_and_the_shapes(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE, SPARSE))
    run = done(ckptconv_here("convert", source, tmp_path / "run/iter_0000012", "--to", "megatron", "--no-fsync"))
    assert "2 after the vocabulary are padding" in run.out
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "12"
    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(tmp_path / "run/iter_0000012/common.pt", weights_only=True)
    assert (common["iteration"], common["checkpoint_version"]) == (12, 3.0)
    args = vars(common["args"])
    assert {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_query_groups": 1,
    }.items() <= args.items()
    assert {"kv_channels": 4, "padded_vocab_size": ROWS, "vocab_size": 18, "rotary_base": 5000}.items() <= args.items()
    assert {"num_experts": EXPERTS, "moe_layer_freq": [0, 1], "swiglu": True}.items() <= args.items()
    assert (args["no_save_optim"], args["no_save_rng"]) == (True, True)


def test_without_a_configuration_no_arguments_are_invented(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE), None)
    run = done(ckptconv_here("convert", source, tmp_path / "run", "--to", "megatron", "--no-fsync"))
    assert "No arguments were written" in run.out
    assert "args" not in torch.load(tmp_path / "run/release/common.pt", weights_only=True)


def test_there_and_back_gives_the_same_tensors(tmp_path: Path) -> None:
    tensors = model(*[DENSE] * LAYERS)
    done(ckptconv_here("convert", saved(tmp_path / "model", tensors), tmp_path / "run", *QUIETLY))
    done(ckptconv_here("dcp2safetensors", tmp_path / "run", tmp_path / "back.safetensors", "--unstack", "--quiet"))
    assert_same(load_file(tmp_path / "back.safetensors"), tensors)
    done(ckptconv_here("convert", tmp_path / "run", tmp_path / "again", *QUIETLY))
    for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json"):
        assert (tmp_path / "again/release" / name).read_bytes() == (tmp_path / "run/release" / name).read_bytes(), name


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    tensors = model(DENSE)
    embeddings = tensors["embedding.word_embeddings.weight"]
    (tmp_path / "model").mkdir()
    torch.save({**tensors, "output_layer.weight": embeddings}, tmp_path / "model/model.pt")
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    done(ckptconv_here("convert", tmp_path / "model/model.pt", tmp_path / "run", *QUIETLY))
    assert "output_layer.weight" not in loaded(tmp_path / "run/release")
    common = torch.load(tmp_path / "run/release/common.pt", weights_only=False)
    assert common["args"].untie_embeddings_and_output_weights is False


# ------------------------------------------------------------------------------------------------ replaced, and refused


def test_an_earlier_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE))
    done(ckptconv_here("convert", source, tmp_path / "run", *QUIETLY, "--chunks", "2"))
    done(ckptconv_here("convert", source, tmp_path / "run", *QUIETLY))
    assert {path.name for path in (tmp_path / "run/release").glob("*.distcp")} == {"__0_0.distcp"}
    done(ckptconv_here("convert", source, tmp_path / "run/iter_0000007", *QUIETLY))
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "7"


def test_the_pointer_of_another_program_stays(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE))
    (tmp_path / "run/iter_0000100").mkdir(parents=True)
    (tmp_path / "run/iter_0000100/common.pt").write_bytes(b"theirs")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("100")
    run = ckptconv_here("convert", source, tmp_path / "run", *QUIETLY)
    assert run.code == 2
    assert "which ckptconv did not write" in run.err
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "100"
    assert not (tmp_path / "run/release").exists()


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {"decoder.": "model.", "self_attention.linear_proj": "self_attn.o_proj"}
    for ours, theirs in names.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    return tensors


def without(part: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("tensors", "code", "message"),
    [
        (renamed(model(DENSE)), 5, "does not have Megatron-core's names of tensors"),
        (without(".layers.1.", model(*[DENSE] * 3)), 4, "lack number 1 of 3"),
        (without("linear_fc1.weight0", model(SPARSE)), 4, "lack number 0 of 2"),
    ],
)
def test_what_no_model_of_megatron_has_is_refused(
    tensors: dict[str, torch.Tensor], code: int, message: str, tmp_path: Path
) -> None:
    run = ckptconv_here("convert", saved(tmp_path / "model", tensors), tmp_path / "run", *QUIETLY)
    assert run.code == code
    assert message in run.err
    assert not (tmp_path / "run").exists()


def test_optimizer_states_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE))
    run = ckptconv_here("convert", source, tmp_path / "run", *QUIETLY, "--states", source)
    assert run.code == 2
    assert "not written for Megatron-core yet" in run.err


def test_a_changed_step_is_not_verified(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE))
    done(ckptconv_here("convert", source, tmp_path / "run", *QUIETLY))
    done(ckptconv_here("verify", source, tmp_path / "run"))
    pointer = tmp_path / "run/latest_checkpointed_iteration.txt"
    pointer.write_text("1234567")
    assert ckptconv_here("verify", source, tmp_path / "run").code == 1
    pointer.write_text("release")
    data = tmp_path / "run/release/__0_0.distcp"
    changed = bytearray(data.read_bytes())
    changed[len(changed) // 2] ^= 1
    data.write_bytes(changed)
    assert ckptconv_here("verify", source, tmp_path / "run").code == 1
