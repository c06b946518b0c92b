"""zero-to-fp32 on checkpoints that the real DeepSpeed wrote, against the live model's masters and buffers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from cells import VERIFY
from checkpoints import (
    ZERO,
    assert_same,
    bits,
    ckptconv_here,
    copy_of,
    done,
    load_with_aliases,
    tag_of,
    widened,
)
from effort import every
from reading import state_in
from safetensors.torch import load_file

from ckptconv.options.registered import missing

# Tensor parallel checkpoints have a result for every rank, and are tested below.
CASES = ZERO.cases


def expected_of(case: str, name: str = "expected") -> dict[str, torch.Tensor]:
    return {name: widened(tensor) for name, tensor in load_file(ZERO / case / f"{name}.safetensors").items()}


@every("case", CASES)
def test_weights_are_bit_for_bit_those_of_the_live_model(case: str, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    done(ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", output))
    got = load_with_aliases(output)
    if case.startswith("pipe"):
        # What was recorded of the live pipeline is its parameters; buffers are only in the layers' files.
        buffers = {name: got.pop(name) for name in ("1.steps", "5.steps")}
        assert all(tensor.dtype == torch.int64 for tensor in buffers.values())
    assert_same(got, expected_of(case))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@every("case", ["z1_bf16_w2", "z2_bf16_frozen_w2", "z3_fp32_w4"])
def test_stored_dtypes_are_kept_when_asked(case: str, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    assert ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", output, "--dtype", "keep").code == 0
    assert_same(load_with_aliases(output), load_file(ZERO / case / "expected.safetensors"))


def test_the_tag_that_is_asked_for_is_converted(tmp_path: Path) -> None:
    checkpoint = ZERO / "z2_bf16_tags_w2/checkpoint"
    for tag in ("global_step2", "global_step3"):
        assert ckptconv_here("zero-to-fp32", checkpoint, tmp_path / f"{tag}.safetensors", "-t", tag).code == 0
        assert ckptconv_here("zero-to-fp32", checkpoint / tag, tmp_path / f"{tag}.direct.safetensors").code == 0
        direct = (tmp_path / f"{tag}.direct.safetensors").read_bytes()
        assert (tmp_path / f"{tag}.safetensors").read_bytes() == direct
    assert (tmp_path / "global_step2.safetensors").read_bytes() != (tmp_path / "global_step3.safetensors").read_bytes()


def test_the_report_is_one_json_object_with_what_was_done(tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    report = ckptconv_here("zero-to-fp32", ZERO / "z3_bf16_frozen_w2/checkpoint", output, "--json").json
    assert report["ok"] is True
    assert report["command"] == "zero-to-fp32"
    (written,) = report["outputs"]
    assert written == {"path": str(output), "bytes": output.stat().st_size, "tensors": len(load_file(output))}
    assert report["tensors"] == written["tensors"]
    assert report["bytes_written"] == written["bytes"]
    assert report["counts"] == {"trainable": 10, "frozen": 4, "buffers": 8, "aliases": 1}
    assert report["seconds"] > 0
    assert "deepspeed.runtime.zero.config.ZeroStageEnum" in report["opaque"]


def test_each_tensor_parallel_rank_is_converted_for_itself_when_asked(tmp_path: Path) -> None:
    output = tmp_path / "model"
    run = done(ckptconv_here("zero-to-fp32", ZERO / "tp_z2_mp2_w4/checkpoint", output, "--per-rank", "--json"))
    for rank in ("mp_rank_00", "mp_rank_01"):
        expected = expected_of("tp_z2_mp2_w4", f"expected.mp{rank[-2:]}")
        assert_same(load_with_aliases(output / rank), expected)
    assert [written["path"] for written in run.json["outputs"]] == [
        str(output / rank / "model.safetensors") for rank in ("mp_rank_00", "mp_rank_01")
    ]


# ------------------------------------------------------------------------------------------------ optimizer states


# ZeRO-0 numbers its states.
STATES = [
    name
    for name in ZERO.names
    if (ZERO / name / "optimizer.safetensors").exists() and not (missing("order") and name.startswith("z0"))
]


@every("case", STATES)
def test_optimizer_states_are_those_of_the_live_optimizer(case: str, tmp_path: Path) -> None:
    output = tmp_path / "optimizer.safetensors"
    done(ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", "--optimizer", output))
    got = load_with_aliases(output)
    for name, tensor in load_file(ZERO / case / "optimizer.safetensors").items():
        assert torch.equal(bits(got[name]), bits(tensor)), name
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.safetensors"]
    # And nested as torch has them.
    state = state_in(output)
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
    done(ckptconv_here("zero-to-fp32", ZERO / "z3_bf16_w2/checkpoint", weights, *options))
    nested = state_in(states)
    assert set(nested["state"]) <= set(load_file(weights))
    assert "model.l1.weight" in nested["state"]
    assert not any("l2" in name for group in nested["param_groups"] for name in group["params"])


# ------------------------------------------------------------------------------------------------- what is refused


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


def test_the_model_file_of_rank_0_is_needed(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_fp32_w4", tmp_path))
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    refused(tmp_path, checkpoint, 4, "rank 0", "ranks 1, 2, 3")


def test_a_file_left_from_a_larger_run_is_named(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_bf16_w2", tmp_path))
    optim = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(tag / optim.format(1), tag / optim.format(2))
    refused(tmp_path, checkpoint, 4, "2 ranks", "rank 2", "another save")


def test_files_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    tag = tag_of(checkpoint := copy_of("z3_bf16_w2", tmp_path))
    other = tag_of(ZERO / "z2_bf16_w2/checkpoint")
    optim = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / optim, tag / optim)
    refused(tmp_path, checkpoint, 4, optim, "come from different saves.")


@every("tag", ["../checkpoint/global_step3", "/etc", "..", "a/b"])
def test_latest_that_points_outside_is_unsafe(tmp_path: Path, tag: str) -> None:
    checkpoint = copy_of("z3_bf16_w2", tmp_path)
    (checkpoint / "latest").write_text(tag)
    refused(tmp_path, checkpoint, 3, tag)


def test_a_directory_that_is_no_checkpoint_is_explained(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    refused(tmp_path, tmp_path / "run", 2, "not a DeepSpeed checkpoint", "save_checkpoint")
    refused(tmp_path, tmp_path / "missing", 2, "does not exist")


def test_float64_stays_by_default_and_is_cast_when_asked_for_as_of_any_source(tmp_path: Path) -> None:
    checkpoint = copy_of("z2_bf16_w2", tmp_path)
    (path,) = tag_of(checkpoint).glob("mp_rank_00_model_states.pt")
    states = torch.load(path, weights_only=False)
    states["module"]["wide"] = torch.tensor([1 / 3], dtype=torch.float64)
    states["buffer_names"] = [*states["buffer_names"], "wide"]
    torch.save(states, path)
    run = done(ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "a.safetensors"))
    assert "2 tensors keep a wider dtype than float32: 'f64', 'wide'. Use --dtype to cast these." in run.err
    assert load_file(tmp_path / "a.safetensors")["wide"].dtype == torch.float64
    run = done(ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "b.safetensors", "--dtype", "float32", *VERIFY))
    assert "wider" not in run.err
    assert torch.equal(load_file(tmp_path / "b.safetensors")["wide"], states["module"]["wide"].float())


def test_tags_are_listed_in_the_order_of_their_numbers_whatever_they_are_called(tmp_path: Path) -> None:
    for tag in ("step10", "step9", "²"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "mp_rank_00_model_states.pt").touch()
    refused = ckptconv_here("zero-to-fp32", tmp_path, tmp_path / "out")
    refused.refused(2, "The tags are ², step9, step10 (choose one with --tag).")
