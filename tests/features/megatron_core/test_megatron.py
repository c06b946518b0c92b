"""Megatron-core's checkpoints, which data/make.py made with the real program: what comes out is what the
live model and its optimizer held."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFY, naming_attacks, verifying
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from features.dcp.cases import converted, refused
from features.dcp.writer import Checkpoint, grid
from features.megatron_core.cases import archive, unpacked
from format_suite import FormatSuite
from reading import state_of
from safetensors.torch import load_file

from ckptconv.formats.detect import open_source
from ckptconv.options.table import OPTIONS

CASES = [
    "hashed_tp2_dp2",
    "reshardable_tp2_dp2",
    "float16_pp2",
    "unstacked_tp2",
    "flattened_tp2_dp2",
    "moe_ep2_chained",
]
# Those whose states are in buffers without names.
BUFFERS = ["buckets_dp2", "gathered_dp2"]
MASTERS = (".param", ".fp32_param")


def one_for_each_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"decoder\.layers\.(\D.*)", name)
        for layer, one in enumerate(tensor) if match else [(-1, tensor)]:
            made[f"decoder.layers.{layer}.{match[1]}" if match else name] = one.clone()
    return made


def states(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(path).items() if not name.endswith(MASTERS)}


class TestFormat(FormatSuite):
    command = "dcp2safetensors"
    family = "dcp"
    weights = "*.distcp"
    shards = ("--max-shard-size", "1KB")

    def write(self, place: Path) -> Path:
        return unpacked("reshardable_tp2_dp2", place)

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return archive("reshardable_tp2_dp2")[1]["model"]  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------- weights, masters, states


@every("case", [*CASES, *BUFFERS])
def test_weights_are_those_of_the_live_model(case: str, tmp_path: Path) -> None:
    converted(unpacked(case, tmp_path), tmp_path / "o.safetensors", *VERIFY)
    assert_same(load_file(tmp_path / "o.safetensors"), archive(case)[1]["model"])


@verifying
@every("case", CASES)
def test_layers_are_unstacked_on_request_weights_and_states_alike(case: str, tmp_path: Path) -> None:
    held = archive(case)[1]
    checkpoint = unpacked(case, tmp_path)
    output = tmp_path / "o"
    converted(checkpoint, output, "--unstack", "--optimizer", tmp_path / "s.safetensors")
    assert_same(load_file(next(output.glob("*.safetensors"))), one_for_each_layer(held["model"]))
    assert_same(states(tmp_path / "s.safetensors"), one_for_each_layer(held["states"]))
    run = done(ckptconv_here("verify", checkpoint, output, "--json"))
    assert run.json["bytes_compared"] > 0


@every("case", CASES)
def test_masters_take_the_place_of_weights_on_request(case: str, tmp_path: Path) -> None:
    held = archive(case)[1]
    converted(unpacked(case, tmp_path), tmp_path / "o.safetensors", "--master", *VERIFY)
    found = load_file(tmp_path / "o.safetensors")
    assert_same(found, held["masters"])
    assert {str(tensor.dtype) for tensor in found.values()} == {"torch.float32"}


def test_the_same_is_loaded_on_request(tmp_path: Path) -> None:
    held = archive("float16_pp2")[1]
    checkpoint = unpacked("float16_pp2", tmp_path)
    loaded = state_of(checkpoint, master=True, unstack=True)
    values = {"common", "objects"}
    assert_same({k: v for k, v in loaded.items() if k not in values}, one_for_each_layer(held["masters"]))


@every("case", CASES)
def test_states_are_named_after_parameters_and_have_their_shapes(case: str, tmp_path: Path) -> None:
    held = archive(case)[1]
    converted(unpacked(case, tmp_path), "--optimizer", tmp_path / "o.safetensors", *VERIFY)
    assert_same(states(tmp_path / "o.safetensors"), held["states"])


@every("case", BUFFERS)
@every("asked", ["--master", "--optimizer"])
def test_states_in_buffers_without_names_are_refused(case: str, asked: str, tmp_path: Path) -> None:
    checkpoint = unpacked(case, tmp_path)
    output = tmp_path / "o.safetensors"
    asked_for = {"--master": (output, asked), "--optimizer": (asked, output)}[asked]
    run = ckptconv_here("dcp2safetensors", checkpoint, *asked_for)
    assert run.code == 5
    assert "without a record of which elements belong to which parameter" in run.err
    assert "fully-reshardable" in run.err
    assert not output.exists()


def test_without_an_optimizer_there_are_no_masters(tmp_path: Path) -> None:
    checkpoint = megatron({"w": torch.ones(2)}).write(tmp_path / "c")
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert "no fp32 masters" in refused(checkpoint, tmp_path / "o.safetensors", 5, "--master")


def test_what_has_no_master_is_taken_as_stored_and_named(tmp_path: Path) -> None:
    made = megatron({"w": torch.ones(2).bfloat16(), "expert_bias": torch.ones(3)})
    made.add(("optimizer.state.fp32_param.w",), torch.full((2,), 1.001))
    checkpoint = made.write(tmp_path / "c")
    run = converted(checkpoint, tmp_path / "o.safetensors", "--master")
    assert_same(load_file(tmp_path / "o.safetensors"), {"w": torch.full((2,), 1.001), "expert_bias": torch.ones(3)})
    assert "Left at their stored precision, because they have no fp32 master: 'expert_bias'" in run.out


@every(
    "rows, experts, transposed",
    [(4, 2, True), (2, 2, True), (2, 1, True), (2, 1, False), (4, 1, False)],
    ids=["grouped", "grouped-glu", "one of a rank", "sequential-glu", "sequential"],
)
def test_experts_that_are_transposed_when_saved_have_states_that_are_not(
    rows: int, experts: int, transposed: bool, tmp_path: Path
) -> None:
    """`GroupedMLP` saves chunks of `rows`, of all experts of a rank, and its flattened states by expert."""
    name = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    weight, parts = torch.arange(24.0).reshape(2, 4, 3), 4 // rows
    starts = [(expert, row, 0) for expert in range(0, 2, experts) for row in range(0, 4, rows)]
    made = megatron({})
    made.add((name,), weight, [(start, (experts, rows, 3)) for start in starts])
    flat = [piece.t() if transposed else piece for expert in weight for piece in expert.split(rows)]
    grid = (2, 1, parts) if transposed else (2, parts, 1)
    made.add((f"optimizer.state.exp_avg.{name}",), torch.stack([row.flatten() for row in flat]).reshape(*grid, -1))
    checkpoint = made.write(tmp_path / "c")
    converted(checkpoint, "--optimizer", tmp_path / "o.safetensors", *VERIFY)
    assert_same(load_file(tmp_path / "o.safetensors"), {f"{name}.exp_avg": weight})


# ------------------------------------------------------------------------------------------------------ other values


@every("case", ["reshardable_tp2_dp2", "hashed_tp2_dp2"])
def test_values_beside_the_tensors_are_in_the_record_and_shown(case: str, tmp_path: Path) -> None:
    """Up to release 0.18 they are in common.pt, from 0.19 on in an object among the tensors."""
    checkpoint = unpacked(case, tmp_path)
    source = open_source(checkpoint)
    tree = source.weights
    facts, called, warnings = source.facts, source.format, source.warnings
    assert tree["common"]["iteration"] == 20
    assert tree["common"]["args"]["data_path"] == ["a", "b"]
    assert tree["common"]["optimizer"]["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert all("/shard_" in name for name in tree["objects"])
    assert (facts["iteration"], facts["TP"], facts["PP"], facts["ranks"]) == (20, 2, 1, 4)
    assert facts["learning rate"] == 0.01
    assert "Megatron-core" in called
    assert not warnings


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_files_are_those_of_the_manifest(tmp_path: Path) -> None:
    """`integrity.json` states the SHA-256 of each file: nothing of a file that differs is converted."""
    checkpoint = unpacked("hashed_tp2_dp2", tmp_path)
    output = tmp_path / "o.safetensors"
    for name in ("__1_0.distcp", ".metadata", "metadata.json"):
        file = checkpoint / "iter_0000020" / name
        flip(file)
        ckptconv_here("convert", checkpoint, output).refused(4, name, "SHA-256")
        assert not output.exists()
        flip(file)
    file = checkpoint / "iter_0000020" / "__1_0.distcp"
    file.rename(tmp_path / "elsewhere")
    ckptconv_here("convert", checkpoint, output).refused(4, "): '__1_0.distcp'.")


def test_a_common_pt_is_that_of_the_manifest(tmp_path: Path) -> None:
    checkpoint = with_common({"iteration": 3}, tmp_path)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}
    (checkpoint / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))
    converted(checkpoint, tmp_path / "o.safetensors")
    flip(checkpoint / "common.pt")
    refused(checkpoint, tmp_path / "p.safetensors", 4)


@every(
    "manifest, code, word",
    [
        ("{", 4, "integrity.json is not valid: "),
        ("[]", 5, "is supported."),
        ('{"algorithm": "md5", "files": {}}', 5, "'md5'"),
        ('{"algorithm": "sha256", "files": {"common.pt": "0"}}', 4, "a valid SHA-256"),
        (f'{{"algorithm": "sha256", "files": {{"../x": "{"0" * 64}"}}}}', 3, "is outside its directory"),
    ],
)
def test_a_manifest_that_cannot_be_believed_is_refused(manifest: str, code: int, word: str, tmp_path: Path) -> None:
    checkpoint = with_common({}, tmp_path)
    (checkpoint / "integrity.json").write_text(manifest)
    assert word in refused(checkpoint, tmp_path / "o.safetensors", code)


def test_objects_and_tensors_in_common_pt_are_left_out_and_named(tmp_path: Path) -> None:
    loop = argparse.Namespace()
    loop.itself = loop
    values = {"iteration": 3, "step": torch.ones(1), "object": [1, Path("x")], "loop": loop}
    values["args"] = argparse.Namespace(lr=0.5, inner=argparse.Namespace(a=(1, 2)), odd=argparse.Action)
    run = converted(with_common(values, tmp_path), tmp_path / "o.safetensors")
    for name in ("step", "object", "loop.itself", "args.odd"):
        assert name in run.out
    assert set(load_file(tmp_path / "o.safetensors")) == {"w"}
    assert open_source(tmp_path / "c").weights["common"] == {
        "iteration": 3,
        "loop": {},
        "args": {"lr": 0.5, "inner": {"a": (1, 2)}},
    }


class Attack:
    def __reduce__(self) -> Any:
        return __import__("os").system, ("true",)


@naming_attacks
def test_an_attack_in_common_pt_is_refused_and_does_not_run(tmp_path: Path) -> None:
    checkpoint = with_common({"iteration": Attack()}, tmp_path)
    assert "system" in refused(checkpoint, tmp_path / "o.safetensors", 3)


@every("content, code", [(b"", 4), (b"\x80\x02K\x01.", 5), (b"PK\x03\x04" + b"\0" * 90, 4)])
def test_a_common_pt_that_torch_did_not_write_is_refused(content: bytes, code: int, tmp_path: Path) -> None:
    checkpoint = with_common({}, tmp_path)
    (checkpoint / "common.pt").write_bytes(content)
    assert "common.pt" in refused(checkpoint, tmp_path / "o.safetensors", code)


def test_a_common_pt_without_a_dict_is_corrupt(tmp_path: Path) -> None:
    assert "common.pt does not contain the dict" in refused(with_common([1], tmp_path), tmp_path / "o.safetensors", 4)


def test_shared_values_are_read_once(tmp_path: Path) -> None:
    value: list[Any] = [1]
    for _ in range(12):
        value = [value, value]
    converted(with_common({"laughs": value, "w": 1}, tmp_path), tmp_path / "o.safetensors")


# ------------------------------------------------------------------------------------------------------ what is a lie


def megatron(tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    made = Checkpoint(paths=None)
    for name, tensor in tensors.items():
        made.add((name,), tensor)
    made.files.setdefault("common.pt", bytearray())
    file = io.BytesIO()
    torch.save({"iteration": 1}, file)
    made.files["common.pt"] += file.getvalue()
    return made


def with_common(values: Any, tmp_path: Path) -> Path:
    checkpoint = megatron({"w": torch.ones(2)}).write(tmp_path / "c")
    torch.save(values, checkpoint / "common.pt")
    return checkpoint


@every("shape", [(5,), (3, 4), (2, 1, 5), (1, 1, 1, 12), ()])
def test_a_state_that_cannot_have_its_parameter_s_shape_is_corrupt(shape: tuple[int, ...], tmp_path: Path) -> None:
    made = megatron({"w": torch.ones(4, 3)})
    made.add(("optimizer.state.exp_avg.w",), torch.ones(shape))
    run = ckptconv_here("dcp2safetensors", made.write(tmp_path / "c"), "--optimizer", tmp_path / "o.safetensors")
    assert run.code == 4
    assert "The two come from different saves" in run.err


def test_a_master_that_is_not_fp32_is_corrupt(tmp_path: Path) -> None:
    made = megatron({"w": torch.ones(4)})
    made.add(("optimizer.state.param.w",), torch.ones(4).bfloat16())
    assert "float32" in refused(made.write(tmp_path / "c"), tmp_path / "o.safetensors", 4, "--master")


def test_overlapping_shards_are_corrupt(tmp_path: Path) -> None:
    made = megatron({})
    made.add(("decoder.layers.w",), torch.ones(2, 4), [((0, 0), (1, 4)), ((1, 0), (1, 2)), ((1, 1), (1, 2))])
    assert "overlap" in refused(made.write(tmp_path / "c"), tmp_path / "o.safetensors", 4, "--unstack")


def test_stacks_of_unequal_layers_are_not_unstacked(tmp_path: Path) -> None:
    checkpoint = megatron({"decoder.layers.a": torch.ones(2, 3), "decoder.layers.b": torch.ones(3, 2)})
    assert "cannot be unstacked" in refused(
        checkpoint.write(tmp_path / "c"), tmp_path / "o.safetensors", 5, "--unstack"
    )


def test_a_layer_that_is_there_twice_is_corrupt(tmp_path: Path) -> None:
    checkpoint = megatron({"layers.a": torch.ones(2, 3), "layers.1.a": torch.ones(3)})
    assert "a layer of the former" in refused(
        checkpoint.write(tmp_path / "c"), tmp_path / "o.safetensors", 4, "--unstack"
    )


@every("layers", [0, 1 << 40])
def test_a_number_of_layers_that_no_model_has_is_corrupt(layers: int, tmp_path: Path) -> None:
    made = megatron({"w": torch.ones(2)})
    made.add(("layers.a",), torch.empty(layers, 0), [])
    assert "layers" in refused(made.write(tmp_path / "c"), tmp_path / "o.safetensors", 4, "--unstack")


def test_a_grid_of_more_shards_than_any_model_has_is_corrupt(tmp_path: Path) -> None:
    made = megatron({})
    made.add(("w",), torch.empty(1 << 40, 0), [])
    made.add(("optimizer.state.exp_avg.w",), torch.empty(1 << 40, 1, 0), [])
    run = ckptconv_here("dcp2safetensors", made.write(tmp_path / "c"), "--optimizer", tmp_path / "o.safetensors")
    assert run.code == 4


def test_masters_are_among_what_identifies_the_input(tmp_path: Path) -> None:
    """Their checksums are read, so that a changed master is noticed."""
    checkpoint = unpacked("float16_pp2", tmp_path)
    weights, masters = open_source(checkpoint), open_source(checkpoint, master=True)
    assert weights.inputs.keys() == masters.inputs.keys()
    assert weights.inputs["__0_0.distcp"] != masters.inputs["__0_0.distcp"]


def test_several_stacks_are_unstacked_each_by_itself(tmp_path: Path) -> None:
    tensors = {"encoder.layers.a": torch.rand(3, 2), "decoder.layers.a": torch.rand(2, 4), "layers.norm": torch.rand(2)}
    made = megatron(tensors)
    made.add(("vision.decoder.layers.w",), torch.arange(8.0).reshape(2, 4), grid((2, 4), {0: (1,), 1: (2,)}))
    converted(made.write(tmp_path / "c"), tmp_path / "o.safetensors", "--unstack")
    found = load_file(tmp_path / "o.safetensors")
    assert len(found) == 3 + 2 + 2 + 2
    assert torch.equal(found["vision.decoder.layers.1.w"], torch.arange(4.0, 8.0))
    assert torch.equal(found["layers.1.norm"], tensors["layers.norm"][1])


@every("backend, version", [("zarr", 1), ("torch_dist", 2)])
def test_another_backend_is_refused(backend: str, version: int, tmp_path: Path) -> None:
    checkpoint = with_common({}, tmp_path)
    metadata = {"sharded_backend": backend, "sharded_backend_version": version}
    (checkpoint / "metadata.json").write_text(json.dumps(metadata))
    assert "--ckpt-format torch_dist" in refused(checkpoint, tmp_path / "o.safetensors", 5)


@every("below", ["", "iter_0000001"])
def test_a_directory_for_each_tensor_is_refused(below: str, tmp_path: Path) -> None:
    """As the backend of zarr wrote them, without .metadata."""
    directory = tmp_path / "run/iter_0000001"
    (directory / "decoder.weight").mkdir(parents=True)
    (directory / "decoder.weight/.zarray").write_text("{}")
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("1")
    for command in ("dcp2safetensors", "convert"):
        run = ckptconv_here(command, tmp_path / "run" / below, tmp_path / "o.safetensors")
        run.refused(5, "'zarr'", "--ckpt-format torch_dist")


@every("text", ["{}", "[]", "{", '{"sharded_backend": 3}', '{"a": 1, "a": 2}'])
def test_another_program_s_metadata_json_means_nothing(text: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("model", "w"), torch.ones(2))
    directory = checkpoint.write(tmp_path / "c")
    (directory / "metadata.json").write_text(text)
    converted(directory, tmp_path / "o.safetensors")
    assert set(load_file(tmp_path / "o.safetensors")) == {"w"}


def test_for_others_the_options_are_of_no_use(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.add(("model", "layers.w"), torch.ones(2))
    directory = checkpoint.write(tmp_path / "c")
    # The output would not have the tensors that they select.
    for option in ("--unstack", "--master"):
        run = ckptconv_here("convert", directory, tmp_path / "m.safetensors", option)
        run.refused(2, f"{option} has no effect")
        assert not (tmp_path / "m.safetensors").exists()


# ------------------------------------------------------------------------------------------------------ where it is


@every(
    "below",
    [
        "iter_0000020",
        "release",
        "weights",
        "model_weights",
        "weights/iter_0000000",
        "dist_ckpt",
        "actor/dist_ckpt",
        "global_step_10/actor/dist_ckpt",
        "step_10/policy/weights/iter_0000000",
        "model--val_loss=1.0-step=9/weights",
    ],
)
def test_a_checkpoint_is_found_where_frameworks_put_it(below: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    megatron({"w": torch.ones(2)}).write(run / below)
    (run / "context").mkdir()
    named = run / below.split("/", maxsplit=1)[0] if "--" in below else run
    converted(named, tmp_path / "o.safetensors")
    assert set(load_file(tmp_path / "o.safetensors")) == {"w"}


@every("latest, taken", [("1", "iter_0000001"), ("release\n", "release"), ("2", "iter_0000002")])
def test_megatron_s_file_says_which_step_is_the_last(latest: str, taken: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("iter_0000001", "iter_0000002", "release"):
        megatron({step: torch.ones(2)}).write(run / step)
    (run / "latest_checkpointed_iteration.txt").write_text(latest)
    converted(run, tmp_path / "o.safetensors")
    assert set(load_file(tmp_path / "o.safetensors")) == {taken}
    assert open_source(run).pointers == (str(run / "latest_checkpointed_iteration.txt"),)


@verifying
@every("latest, why", [("1", "as latest_checkpointed_iteration.txt specifies"), ("", "the last of 2 steps")])
def test_verify_names_the_step_of_a_run_that_it_compares(latest: str, why: str, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "o.safetensors"
    for number in (1, 2):
        megatron({"w": torch.full((2,), float(number))}).write(run / f"iter_000000{number}")
    if latest:
        (run / "latest_checkpointed_iteration.txt").write_text(latest)
    taken = f"Took iter_000000{latest or 2}, {why}."
    assert taken in done(ckptconv_here("convert", run, output, "--no-fsync")).out
    verified = done(ckptconv_here("verify", run, output))
    assert f"{taken}\nequal to {run}: " in verified.out
    assert json.loads(done(ckptconv_here("verify", run, output, "--json")).out)["notes"] == [taken]
    # The step itself needs no note.
    assert "Took" not in done(ckptconv_here("verify", run / f"iter_000000{latest or 2}", output)).out


def test_a_tag_of_a_run_that_is_not_deepspeed_s_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (10, 110, 200):
        megatron({"w": torch.ones(2)}).write(run / f"iter_{number:07}")
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    words = ("convert", run, tmp_path / "o.safetensors", "--tag")
    step = run / "iter_0000010"
    ckptconv_here(*words, step.name).refused(2, "--tag has no effect", f"Give the directory of the step: {step}")
    ckptconv_here(*words, "10").refused(2, "--tag has no effect", "Give the directory of the step, or leave --tag out.")
    assert not (tmp_path / "o.safetensors").exists()
    ckptconv_here("convert", run / "iter_0000010", *words[2:], "10").refused(2, "--tag has no effect")


@every("latest", ["7", "", "../iter_0000001", "release", "x" * 64, "-1"])
def test_a_step_that_is_not_there_is_not_replaced_by_another(latest: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    megatron({"w": torch.ones(2)}).write(run / "iter_0000001")
    (run / "latest_checkpointed_iteration.txt").write_text(latest)
    assert "iter_0000001" in refused(run, tmp_path / "o.safetensors", 4)


# ---------------------------------------------------------------------------------------------------------- with maps

APART = """
[[rule]]
megatron = "decoder.layers.{l}.mlp.linear_fc2.weight"
hf = "model.layers.{l}.mlp.down_proj.weight"
"""
STACKED = """
[[rule]]
megatron = "decoder.layers.mlp.linear_fc2.weight : l h f"
hf = "model.layers.{l}.mlp.down_proj.weight : h f"
"""


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
@every("rules", [APART, STACKED], ids=["a name for each layer", "a stack of layers"])
def test_a_map_finds_layers_as_it_names_them(rules: str, tmp_path: Path) -> None:
    run, map_, out = unpacked("float16_pp2", tmp_path), tmp_path / "map.toml", tmp_path / "o.safetensors"
    map_.write_text(rules)
    only = ("--include", "*linear_fc2.weight", "--no-fsync")
    done = ckptconv_here("convert", run, out, "--map", map_, *only)
    assert done.code == 0, done.err
    plain = tmp_path / "plain.safetensors"
    assert ckptconv_here("convert", run, plain, *only).code == 0
    (stack,) = load_file(plain).values()
    assert_same(load_file(out), {f"model.layers.{at}.mlp.down_proj.weight": each for at, each in enumerate(stack)})


@pytest.mark.skipif("universal" not in OPTIONS, reason="there are no universal checkpoints")
def test_states_that_no_group_names_are_no_universal_checkpoint(tmp_path: Path) -> None:
    words = ("convert", unpacked("reshardable_tp2_dp2", tmp_path), tmp_path / "step", "--to", "universal")
    ckptconv_here(*words).refused(
        5, "no group of its optimizer contains a parameter of the output", "--fresh-optimizer"
    )
    assert ckptconv_here(*words, "--fresh-optimizer").code == 0
