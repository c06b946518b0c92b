"""Steps of Megatron-core as outputs: what torch's own reader and ours find in them, and what is refused."""

from __future__ import annotations

import json
import tarfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import VERIFY, verified_here, verifying
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from safetensors.torch import load_file, save_file

from ckptconv.outputs.kinds import NAMED

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
    done(ckptconv_here("convert", saved(tmp_path / "model", tensors), tmp_path / "run", *QUIETLY, *VERIFY))
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
    assert "of which the last 2 are padding" in run.out
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


@every("kind, expected", [("gemma", True), ("gemma2", True), ("llama", None), (None, None)])
def test_norms_of_gemma_are_an_argument(kind: str | None, expected: bool | None, tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE), {**CONFIG, "model_type": kind})
    done(ckptconv_here("convert", source, tmp_path / "run", "--to", "megatron", "--no-fsync"))
    assert vars(common_of(tmp_path / "run/release")["args"]).get("apply_layernorm_1p") is expected


LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@every(
    "rope, scales, untold",
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0, **LLAMA_3}}, 32.0, ""),
        ({"rope_parameters": {"rope_theta": 5000.0, "rope_type": "llama3", "factor": 8, **LLAMA_3}}, 8.0, ""),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA_3, "low_freq_factor": 2}},
            None,
            "rope_scaling",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, None, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, None, ""),
    ],
)
def test_the_scaling_of_rotary_embeddings_is_an_argument_or_named(
    rope: dict[str, Any], scales: float | None, untold: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "model", model(DENSE), {**CONFIG, **rope})
    run = done(ckptconv_here("convert", source, tmp_path / "run", "--to", "megatron", "--no-fsync"))
    args = vars(common_of(tmp_path / "run/release")["args"])
    assert (args.get("use_rope_scaling"), args.get("rope_scaling_factor")) == (scales and True, scales)
    assert (
        f"Missing from the arguments, so specify them on Megatron-LM's command line: {untold!r}" in run.out
    ) is bool(untold)


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
        (renamed(model(DENSE)), 5, "does not use Megatron-core's tensor names"),
        (without(".layers.1.", model(*[DENSE] * 3)), 4, "up to 2, but number 1 is missing"),
        (without("linear_fc1.weight0", model(SPARSE)), 4, "up to 1, but number 0 is missing"),
    ],
)
def test_what_no_model_of_megatron_has_is_refused(
    tensors: dict[str, torch.Tensor], code: int, message: str, tmp_path: Path
) -> None:
    run = ckptconv_here("convert", saved(tmp_path / "model", tensors), tmp_path / "run", *QUIETLY)
    assert run.code == code
    assert message in run.err
    assert not (tmp_path / "run").exists()


def trained(place: Path, kind: Mapping[str, tuple[int, ...]] = DENSE) -> tuple[Path, dict[str, Any]]:
    """A file of a training with AdamW, whose states have the names of parameters."""
    weights = model(kind)
    states = {
        name: {"step": torch.tensor(7.0), "exp_avg": tensor * 2, "exp_avg_sq": tensor * tensor}
        for name, tensor in weights.items()
    }
    names = {True: [], False: []}  # type: dict[bool, list[str]]
    for name, tensor in weights.items():
        names[tensor.dim() > 1].append(name)
    groups = [{"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.1 * decay, "params": names[decay]} for decay in names]
    torch.save({"model": weights, "optimizer": {"state": states, "param_groups": groups}}, place / "train.pt")
    return place / "train.pt", states


def test_states_are_stored_like_their_parameters_with_masters(tmp_path: Path) -> None:
    source, states = trained(tmp_path)
    step = tmp_path / "run/iter_0000007"
    done(ckptconv_here("convert", source, step, *QUIETLY, "--key", "model", "--states", source, *VERIFY))
    found = loaded(step)
    name = "mlp.linear_fc1.weight"
    own = states[f"decoder.layers.0.{name}"]
    for key, expected in {"exp_avg": own["exp_avg"], "exp_avg_sq": own["exp_avg_sq"]}.items():
        assert torch.equal(found[f"optimizer.state.{key}.decoder.layers.{name}"][0], expected), key
    assert torch.equal(found[f"optimizer.state.param.decoder.layers.{name}"], found[f"decoder.layers.{name}"])
    common = torch.load(step / "common.pt", weights_only=True)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert {(group["wd_mult"], group["weight_decay"], group["step"]) for group in groups} == {(1, 0.1, 7), (0, 0, 7)}


def test_states_need_a_numbered_step(tmp_path: Path) -> None:
    source, _ = trained(tmp_path)
    run = ckptconv_here("convert", source, tmp_path / "run", *QUIETLY, "--key", "model", "--states", source)
    assert (run.code, "--states requires a numbered step" in run.err) == (2, True)
    assert not (tmp_path / "run").exists()


def common_of(step: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(step / "common.pt", weights_only=True)


def test_experts_have_an_optimizer_of_their_own_unless_the_step_is_like_one_without(tmp_path: Path) -> None:
    source, states = trained(tmp_path, SPARSE)
    words = ("convert", source, "--to", "megatron", "--no-fsync", "--key", "model", "--states", source)
    run = done(ckptconv_here(*words, tmp_path / "run/iter_0000007"))
    assert "The states of experts are written as those of a second optimizer" in run.out
    step = tmp_path / "run/iter_0000007"
    name = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    own = states["decoder.layers.0.mlp.experts.linear_fc2.weight1"]
    assert torch.equal(loaded(step)[f"optimizer.state.exp_avg.{name}"][0, 1], own["exp_avg"])
    optimizers = common_of(step)["optimizer"]
    groups = [optimizers[number]["optimizer"]["param_groups"] for number in (0, 1)]
    assert [[group["is_expert_parallel"] for group in part] for part in groups] == [[False] * 4, [True] * 2]
    assert {(group["wd_mult"], group["weight_decay"]) for group in groups[1]} == {(1, 0.1)}
    # A step of a training on one rank has one optimizer.
    example, _ = trained(tmp_path)
    done(
        ckptconv_here(
            "convert", example, tmp_path / "one/iter_0000001", *QUIETLY, "--key", "model", "--states", example
        )
    )
    source, _ = trained(tmp_path, SPARSE)
    like = ("--like", tmp_path / "one")
    run = done(ckptconv_here(*words, tmp_path / "again/iter_0000007", *like, *VERIFY))
    assert "second optimizer" not in run.out
    groups = common_of(tmp_path / "again/iter_0000007")["optimizer"]["optimizer"]["param_groups"]
    assert [group["is_expert_parallel"] for group in groups] == [False] * 4
    verified_here(source, tmp_path / "again/iter_0000007", "--key", "model", "--states", source)


def test_experts_with_settings_of_their_own_need_an_optimizer_of_their_own(tmp_path: Path) -> None:
    example, _ = trained(tmp_path)
    done(
        ckptconv_here(
            "convert", example, tmp_path / "one/iter_0000001", *QUIETLY, "--key", "model", "--states", example
        )
    )
    source, _ = trained(tmp_path, SPARSE)
    tree = torch.load(source)
    matrices = tree["optimizer"]["param_groups"][0]
    experts = [name for name in matrices["params"] if ".experts." in name]
    matrices["params"] = [name for name in matrices["params"] if name not in experts]
    tree["optimizer"]["param_groups"].append({**matrices, "lr": 0.25, "params": experts})
    torch.save(tree, source)
    words = ("convert", source, tmp_path / "run/iter_0000007", *QUIETLY, "--key", "model", "--states", source)
    run = ckptconv_here(*words, "--like", tmp_path / "one")
    assert (run.code, "different settings" in run.err) == (5, True)
    done(ckptconv_here(*words))
    optimizers = common_of(tmp_path / "run/iter_0000007")["optimizer"]
    rates = [{group["lr"] for group in optimizers[number]["optimizer"]["param_groups"]} for number in (0, 1)]
    assert rates == [{0.5}, {0.25}]


def step_of_019(place: Path) -> Path:
    """A step that Megatron-core 0.19.2 saved."""
    with tarfile.open(Path(__file__).parents[1] / "megatron_core/data/hashed_tp2_dp2.tar.xz") as tar:
        tar.extractall(place, filter="data")
    return next(place.rglob("iter_0000020"))


@verifying
def test_a_step_has_the_form_of_the_step_that_it_is_like(tmp_path: Path) -> None:
    """That of release 0.19, with the values that all ranks share among the tensors, and Megatron-Bridge's file."""
    source = saved(tmp_path / "model", model(DENSE))
    done(ckptconv_here("convert", source, tmp_path / "plain", *QUIETLY))
    shared = common_of(tmp_path / "plain/release")
    like = step_of_019(tmp_path / "example")
    (like / "run_config.yaml").write_text("model:\n  num_layers: 1\n")
    run = done(
        ckptconv_here(
            "convert", source, tmp_path / "run", "--to", "megatron", "--no-fsync", "--like", like, "--chunks", "2"
        )
    )
    assert f"run_config.yaml was copied unchanged from {like}" in run.out
    step = tmp_path / "run/release"
    assert not (step / "common.pt").exists()
    assert (step / "run_config.yaml").read_text() == (like / "run_config.yaml").read_text()
    described = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    assert "common_state/shard_0_1" in described
    state: dict[str, Any] = {"common_state/shard_0_1": None}
    with torch.serialization.safe_globals([Namespace]):
        dcp.load(state, checkpoint_id=step, no_dist=True)
    assert state["common_state/shard_0_1"] == [shared]
    verified_here(source, step, "--like", like, "--chunks", "2")
    (step / "run_config.yaml").write_text("model:\n  num_layers: 2\n")
    assert ckptconv_here("verify", source, step, "--like", like, "--chunks", "2").code == 1
    missing = ckptconv_here("verify", source, step)
    assert (missing.code, "--like" in missing.err) == (2, True)
    refused = ckptconv_here("convert", source, tmp_path / "other", *QUIETLY, "--like", source)
    assert (refused.code, "requires a step of Megatron-core" in refused.err) == (2, True)
    assert "come from a config.json next to the checkpoint, or from --size" in refused.err


def test_a_parameter_without_states_is_refused(tmp_path: Path) -> None:
    source, _ = trained(tmp_path)
    tree = torch.load(source)
    del tree["optimizer"]["state"]["output_layer.weight"]
    torch.save(tree, source)
    words = ("convert", source, tmp_path / "run/iter_0000007", *QUIETLY, "--key", "model", "--states", source)
    run = ckptconv_here(*words)
    assert run.code == 5
    assert "not both exist for 'output_layer.weight'" in run.err
    done(ckptconv_here(*words, "--fill-states"))
    filled = loaded(tmp_path / "run/iter_0000007")["optimizer.state.exp_avg.output_layer.weight"]
    assert not filled.any()


NORM = "decoder.final_layernorm.weight"
# Changes to a training, and what is said of each.
ODD_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": ({"exp_avg": torch.ones(HIDDEN, dtype=torch.uint8)}, f"{NORM}.exp_avg is uint8"),
    "fp8": ({"exp_avg_sq": torch.ones(HIDDEN).to(torch.float8_e4m3fn)}, f"{NORM}.exp_avg_sq is float8_e4m3fn"),
    "fp64": ({"exp_avg": torch.ones(HIDDEN, dtype=torch.float64)}, f"{NORM}.exp_avg is float64"),
    "the rest of a master": ({"master_param": torch.ones(HIDDEN, dtype=torch.int16)}, f"{NORM}.master_param is int16"),
    "amsgrad": ({"max_exp_avg_sq": torch.ones(HIDDEN)}, f"{NORM} has the states 'max_exp_avg_sq'"),
    "steps": ({"step": torch.tensor(8.0)}, "one number was expected"),
}


@every("change, said", ODD_STATES.values(), ids=ODD_STATES)
def test_states_that_megatron_core_stores_otherwise_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source, _ = trained(tmp_path)
    tree = torch.load(source)
    tree["optimizer"]["state"][NORM].update(change)
    torch.save(tree, source)
    run = ckptconv_here("convert", source, tmp_path / "iter_0000007", *QUIETLY, "--key", "model", "--states", source)
    assert (run.code, said in run.err) == (5, True), run.err


def test_weights_of_fewer_bits_are_masters_only_with_a_warning(tmp_path: Path) -> None:
    source, _ = trained(tmp_path)
    tree = torch.load(source)
    tree["model"] = {name: tensor.bfloat16() for name, tensor in tree["model"].items()}
    tree["optimizer"]["state"][NORM]["master_param"] = torch.full((HIDDEN,), 1.0001)
    tree["optimizer"]["state"]["stray.weight"] = dict(tree["optimizer"]["state"][NORM])
    tree["optimizer"]["param_groups"][1]["params"].append("stray.weight")
    torch.save(tree, source)
    step = tmp_path / "iter_0000007"
    run = done(ckptconv_here("convert", source, step, *QUIETLY, "--key", "model", "--states", source))
    assert "has no weights for these states: 'stray.weight'" in run.err
    (warning,) = [line for line in run.err.splitlines() if "masters" in line]
    assert "output_layer.weight" in warning
    assert NORM not in warning
    tensors = loaded(step)
    assert tensors[f"optimizer.state.param.{NORM}"].tolist() == [torch.tensor(1.0001).item()] * HIDDEN


@verifying
def test_a_changed_step_is_not_verified(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model(DENSE))
    done(ckptconv_here("convert", source, tmp_path / "run", *QUIETLY))
    verified_here(source, tmp_path / "run")
    pointer = tmp_path / "run/latest_checkpointed_iteration.txt"
    pointer.write_text("1234567")
    ckptconv_here("verify", source, tmp_path / "run").refused(1, f"{pointer} differs from the written output")
    pointer.write_text("release")
    data = tmp_path / "run/release/__0_0.distcp"
    changed = bytearray(data.read_bytes())
    changed[len(changed) // 2] ^= 1
    data.write_bytes(changed)
    assert ckptconv_here("verify", source, tmp_path / "run").code == 1


@verifying
def test_verify_names_the_step_of_a_run_that_it_compares(tmp_path: Path) -> None:
    source, run = saved(tmp_path / "model", model(DENSE)), tmp_path / "run"
    for number in (1, 2):
        done(ckptconv_here("convert", source, run / f"iter_000000{number}", *QUIETLY))
    several = "Specify one of the outputs in it: iter_0000001, iter_0000002."
    ckptconv_here("verify", source, run).refused(2, several)
    assert f"files in {run}/iter_0000002, {run} (" in done(ckptconv_here("verify", source, run / "iter_0000002")).out
    done(ckptconv_here("convert", source, run, *QUIETLY))
    assert f"files in {run}/release, {run} (" in done(ckptconv_here("verify", source, run)).out


def test_the_words_of_megatron_for_its_formats_are_known(tmp_path: Path) -> None:
    words = ("convert", tmp_path / "in", tmp_path / "out")
    for word, kind in (("torch_dist", "megatron"), ("fsdp_dtensor", "megatron-fsdp")):
        if kind in NAMED:
            ckptconv_here(*words, "--to", word).refused(2, f"Did you mean {kind}?")
        ckptconv_here(*words, "--target-ckpt-format", word).refused(2, f"--to {kind} for {word}")
    ckptconv_here(*words, "--tensor-model-parallel-size", "2").refused(2, "--chunks N splits its tensors for N ranks")
