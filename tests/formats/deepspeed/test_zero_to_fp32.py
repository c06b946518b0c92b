"""zero-to-fp32 on checkpoints that the real DeepSpeed wrote, against the live model's masters and buffers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import (
    ZERO,
    assert_same,
    bits,
    ckptconv,
    ckptconv_here,
    copy_of,
    load_with_aliases,
    metadata_of,
    tag_of,
    widened,
)
from safetensors.torch import load_file, save_file

from ckptconv import unflatten

# Tensor parallel checkpoints have a result for every rank, and are tested below.
CASES = sorted(path.name for path in ZERO.iterdir() if (path / "expected.safetensors").exists())


def expected_of(case: str, name: str = "expected") -> dict[str, torch.Tensor]:
    return {name: widened(tensor) for name, tensor in load_file(ZERO / case / f"{name}.safetensors").items()}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_bit_for_bit_those_of_the_live_model(case: str, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    run = ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", output)
    assert run.code == 0, run.err
    got = load_with_aliases(output)
    if case.startswith("pipe"):
        # What was recorded of the live pipeline is its parameters; buffers are only in the layers' files.
        buffers = {name: got.pop(name) for name in ("1.steps", "5.steps")}
        assert all(tensor.dtype == torch.int64 for tensor in buffers.values())
    assert_same(got, expected_of(case))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("case", ["z1_bf16_w2", "z2_bf16_frozen_w2", "z3_fp32_w4"])
def test_stored_dtypes_are_kept_when_asked(case: str, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    assert ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", output, "--dtype", "keep").code == 0
    assert_same(load_with_aliases(output), load_file(ZERO / case / "expected.safetensors"))


def test_a_directory_output_is_sharded_with_an_index_that_names_every_tensor_once(tmp_path: Path) -> None:
    output = tmp_path / "model"
    run = ckptconv_here("zero-to-fp32", ZERO / "z3_bf16_w2/checkpoint", output, "--max-shard-size", "400")
    assert run.code == 0, run.err
    assert_same(load_with_aliases(output), expected_of("z3_bf16_w2"))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert sorted(path.name for path in output.iterdir()) == [
        ".ckptconv-manifest.json", *shards, "model.safetensors.index.json"
    ]  # fmt: skip
    assert len(shards) > 1
    sizes = [sum(t.nbytes for t in load_file(output / name).values()) for name in shards]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= 400
    assert index["metadata"]["head.weight"] == "emb.weight"


def test_a_single_file_equals_what_safetensors_writes_of_the_same_tensors(tmp_path: Path) -> None:
    output, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    assert ckptconv_here("zero-to-fp32", ZERO / "z3_bf16_untied_w2/checkpoint", output).code == 0
    save_file(load_file(output), theirs, {"format": "pt"})
    assert output.read_bytes() == theirs.read_bytes()


def test_the_tag_that_is_asked_for_is_converted(tmp_path: Path) -> None:
    checkpoint = ZERO / "z2_bf16_tags_w2/checkpoint"
    for tag in ("global_step2", "global_step3"):
        assert ckptconv_here("zero-to-fp32", checkpoint, tmp_path / f"{tag}.safetensors", "-t", tag).code == 0
        assert ckptconv_here("zero-to-fp32", checkpoint / tag, tmp_path / f"{tag}.direct.safetensors").code == 0
        direct = (tmp_path / f"{tag}.direct.safetensors").read_bytes()
        assert (tmp_path / f"{tag}.safetensors").read_bytes() == direct
    assert (tmp_path / "global_step2.safetensors").read_bytes() != (tmp_path / "global_step3.safetensors").read_bytes()


def test_frozen_parameters_are_left_out_when_asked(tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    checkpoint = ZERO / "z3_bf16_frozen_w2/checkpoint"
    run = ckptconv_here("zero-to-fp32", checkpoint, output, "--exclude_frozen_parameters", "--json")
    assert run.code == 0, run.err
    frozen = {"l1.bias", "frz.weight", "frz.bias", "frz2.weight"}
    expected = {name: tensor for name, tensor in expected_of("z3_bf16_frozen_w2").items() if name not in frozen}
    assert_same(load_with_aliases(output), expected)


def test_tied_names_are_stored_once_or_each_when_asked(tmp_path: Path) -> None:
    checkpoint = ZERO / "z3_bf16_w2/checkpoint"
    run = ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "alias.safetensors", "--json")
    assert run.json["aliases"] == {"head.weight": "emb.weight"}
    assert metadata_of(tmp_path / "alias.safetensors") == {"format": "pt", "head.weight": "emb.weight"}
    assert "head.weight" not in load_file(tmp_path / "alias.safetensors")
    run = ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "both.safetensors", "--json", "--tied", "duplicate")
    assert run.json["aliases"] == {}
    assert_same(load_file(tmp_path / "both.safetensors"), expected_of("z3_bf16_w2"))


def test_the_report_is_one_json_object_with_what_was_done(tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    report = ckptconv("zero-to-fp32", ZERO / "z3_bf16_frozen_w2/checkpoint", output, "--json").json
    assert report["ok"] is True
    assert report["command"] == "zero-to-fp32"
    (written,) = report["outputs"]
    assert written == {"path": str(output), "bytes": output.stat().st_size, "tensors": len(load_file(output))}
    assert report["tensors"] == written["tensors"]
    assert report["bytes_written"] == written["bytes"]
    assert report["counts"] == {"trainable": 10, "frozen": 4, "buffers": 8, "aliases": 1}
    assert 0 < report["peak_rss_bytes"] < 64 << 20
    assert report["seconds"] > 0
    assert "deepspeed.runtime.zero.config.ZeroStageEnum" in report["opaque"]


def test_each_tensor_parallel_rank_is_converted_for_itself_when_asked(tmp_path: Path) -> None:
    output = tmp_path / "model"
    run = ckptconv_here("zero-to-fp32", ZERO / "tp_z2_mp2_w4/checkpoint", output, "--per-rank", "--json")
    assert run.code == 0, run.err
    for rank in ("mp_rank_00", "mp_rank_01"):
        expected = expected_of("tp_z2_mp2_w4", f"expected.mp{rank[-2:]}")
        assert_same(load_with_aliases(output / rank), expected)
    assert [written["path"] for written in run.json["outputs"]] == [
        str(output / rank / "model.safetensors") for rank in ("mp_rank_00", "mp_rank_01")
    ]


# ------------------------------------------------------------------------------------------------ optimizer states


STATES = sorted(path.parent.name for path in ZERO.glob("*/optimizer.safetensors"))


@pytest.mark.parametrize("case", STATES)
def test_optimizer_states_are_those_of_the_live_optimizer_by_parameter(case: str, tmp_path: Path) -> None:
    output = tmp_path / "optimizer.safetensors"
    run = ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", "--optimizer", output)
    assert run.code == 0, run.err
    got = load_with_aliases(output)
    for name, tensor in load_file(ZERO / case / "optimizer.safetensors").items():
        assert torch.equal(bits(got[name]), bits(tensor)), name
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.safetensors"]


@pytest.mark.parametrize("case", STATES)
def test_optimizer_states_come_back_nested_as_torch_has_them(case: str, tmp_path: Path) -> None:
    output = tmp_path / "optimizer.safetensors"
    assert ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", "--optimizer", output).code == 0
    state = unflatten(load_file(output), metadata_of(output)["ckptconv.structure"])
    weights = expected_of(case)
    assert set(state) == {"state", "param_groups"}
    members = [name for group in state["param_groups"] for name in group["params"]]
    assert sorted(members) == sorted(state["state"])
    for name, states in state["state"].items():
        for key, value in states.items():
            if key != "step":
                assert value.shape == weights[name].shape, (name, key)
    steps = [states["step"] for states in state["state"].values() if "step" in states]
    # Counters that torch increments in place must not be one tensor under many names.
    assert len({id(step) for step in steps if isinstance(step, torch.Tensor)}) in (0, len(steps))
    if not case.startswith("z2_bf16_elastic"):
        assert all(group["lr"] > 0 for group in state["param_groups"])


def test_optimizer_states_follow_the_names_of_the_weights(tmp_path: Path) -> None:
    weights, states = tmp_path / "w.safetensors", tmp_path / "o.safetensors"
    options = ["--exclude", "l2.*", "--rename", "^=model.", "--optimizer", states]
    run = ckptconv_here("zero-to-fp32", ZERO / "z3_bf16_w2/checkpoint", weights, *options)
    assert run.code == 0, run.err
    nested = unflatten(load_file(states), metadata_of(states)["ckptconv.structure"])
    assert set(nested["state"]) <= set(load_file(weights))
    assert "model.l1.weight" in nested["state"]
    assert not any("l2" in name for group in nested["param_groups"] for name in group["params"])


# ------------------------------------------------------------------------------------------------- what is refused


def test_tensor_parallel_ranks_that_nothing_tells_how_to_join_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    run = ckptconv_here("zero-to-fp32", ZERO / "tp_z2_mp2_w4/checkpoint", tmp_path / "model")
    assert run.code == 5
    assert "tensor parallel: 2 ranks × 2 data-parallel" in run.err
    assert "--per-rank" in run.err
    assert not (tmp_path / "model").exists()


def refused(tmp_path: Path, checkpoint: Path, code: int, *words: str) -> None:
    """The checkpoint ends in `code` and one paragraph with `words`, and nothing is left under a final name."""
    before = sorted(tmp_path.rglob("*"))
    run = ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "model.safetensors")
    assert len(run.refused(code, *words).strip().splitlines()) == 1
    assert not run.out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    checkpoint = copy_of("z3_fp32_w4", tmp_path)
    (tag_of(checkpoint) / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    refused(tmp_path, checkpoint, 4, "rank 2", "lacks")


def test_the_last_rank_missing_is_named_although_the_others_are_numbered_without_a_gap(tmp_path: Path) -> None:
    checkpoint = copy_of("z3_fp32_w4", tmp_path)
    (tag_of(checkpoint) / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    refused(tmp_path, checkpoint, 4, "4 ranks", "rank 3")


def test_a_rank_that_is_there_twice_is_named(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_fp32_w4", tmp_path))
    optim = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tag / optim, tag / f"bf16_{optim}")
    refused(tmp_path, checkpoint, 4, "rank 1", optim, f"bf16_{optim}")


def test_a_rank_that_is_a_copy_of_another_is_named(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_fp32_w4", tmp_path))
    optim = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(tag / optim.format(1), tag / optim.format(2))
    refused(tmp_path, checkpoint, 4, f"{optim.format(2)} was written as {optim.format(1)}", "data-parallel rank 2")


def test_the_model_file_of_rank_0_is_needed(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_fp32_w4", tmp_path))
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    refused(tmp_path, checkpoint, 4, "rank 0", "ranks 1, 2, 3")


def test_a_file_left_from_a_larger_run_is_named(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_bf16_w2", tmp_path))
    optim = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(tag / optim.format(1), tag / optim.format(2))
    refused(tmp_path, checkpoint, 4, "2 ranks", "rank 2", "another save")


@pytest.mark.parametrize("kept", [0, 100, 2000, -1])
def test_a_truncated_rank_file_is_named(tmp_path: Path, kept: int) -> None:
    tag = tag_of(checkpoint := copy_of("z3_bf16_w2", tmp_path))
    optim = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    optim.write_bytes(optim.read_bytes()[:kept])
    refused(tmp_path, checkpoint, 4, optim.name)


def test_files_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_bf16_w2", tmp_path))
    other = tag_of(ZERO / "z2_bf16_w2/checkpoint")
    optim = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / optim, tag / optim)
    refused(tmp_path, checkpoint, 4, optim, "not of one save")


def test_shapes_that_name_more_than_there_is_are_refused_with_both_numbers(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_bf16_w2", tmp_path))
    other = tag_of(ZERO / "z3_bf16_frozen_w2/checkpoint")
    model = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.copy(other / model, tag / model)
    refused(tmp_path, checkpoint, 4, "102", "98")


def test_latest_that_points_nowhere_lists_the_tags(tmp_path: Path) -> None:
    checkpoint = copy_of("z2_bf16_tags_w2", tmp_path)
    (checkpoint / "latest").write_text("global_step9")
    refused(tmp_path, checkpoint, 4, "global_step9", "global_step2", "global_step3")


@pytest.mark.parametrize("tag", ["../checkpoint/global_step3", "/etc", "..", "a/b"])
def test_latest_that_points_outside_is_unsafe(tmp_path: Path, tag: str) -> None:
    checkpoint = copy_of("z3_bf16_w2", tmp_path)
    (checkpoint / "latest").write_text(tag)
    refused(tmp_path, checkpoint, 3, tag)


def test_without_latest_the_tags_are_listed(tmp_path: Path) -> None:
    checkpoint = copy_of("z2_bf16_tags_w2", tmp_path)
    (checkpoint / "latest").unlink()
    refused(tmp_path, checkpoint, 2, "global_step2", "global_step3", "--tag")


def test_a_wrong_tag_brings_the_right_ones(tmp_path: Path) -> None:
    run = ckptconv_here("zero-to-fp32", ZERO / "z2_bf16_tags_w2/checkpoint", tmp_path / "model", "-t", "global_step33")
    assert run.code == 2
    assert "Did you mean 'global_step3'?" in run.err


def test_a_directory_that_is_no_checkpoint_is_explained(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    refused(tmp_path, tmp_path / "run", 2, "not a DeepSpeed checkpoint", "save_checkpoint")
    refused(tmp_path, tmp_path / "missing", 2, "does not exist")


def test_a_checkpoint_given_to_the_wrong_command_brings_the_right_one(tmp_path: Path) -> None:
    checkpoint = ZERO / "z3_bf16_w2/checkpoint"
    run = ckptconv_here("pt2safetensors", checkpoint, tmp_path / "model.safetensors")
    assert run.code == 2
    assert f"ckptconv zero-to-fp32 {checkpoint}" in run.err


def test_float64_stays_by_default_and_is_cast_when_asked_for_as_of_any_source(tmp_path: Path) -> None:
    checkpoint = copy_of("z2_bf16_w2", tmp_path)
    (path,) = tag_of(checkpoint).glob("mp_rank_00_model_states.pt")
    states = torch.load(path, weights_only=False)
    states["module"]["wide"] = torch.tensor([1 / 3], dtype=torch.float64)
    states["buffer_names"] = [*states["buffer_names"], "wide"]
    torch.save(states, path)
    run = ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "a.safetensors")
    assert run.code == 0, run.err
    assert "2 tensors are wider than float32, and not cast: 'f64', 'wide'. --dtype float32 casts them too." in run.err
    assert load_file(tmp_path / "a.safetensors")["wide"].dtype == torch.float64
    run = ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "b.safetensors", "--dtype", "float32", "--verify")
    assert run.code == 0, run.err
    assert "wider" not in run.err
    assert torch.equal(load_file(tmp_path / "b.safetensors")["wide"], states["module"]["wide"].float())


def test_tags_are_listed_in_the_order_of_their_numbers_whatever_they_are_called(tmp_path: Path) -> None:
    for tag in ("step10", "step9", "²"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "mp_rank_00_model_states.pt").touch()
    refused = ckptconv_here("zero-to-fp32", tmp_path, tmp_path / "out")
    refused.refused(2, "There are: ², step9, step10 (choose one with --tag).")
