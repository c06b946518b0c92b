"""Universal checkpoints: written as DeepSpeed's ds_to_universal writes them, and read like any other checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ZERO, assert_same, ckptconv_here, copy_of, done, load_with_aliases, tag_of
from effort import every, spread
from features.deepspeed.zero_writer import Model, Save, values, write

CASES = [name for name in ZERO.cases if not name.startswith("z0")]


def universal_of(case: str, tmp_path: Path) -> Path:
    directory = tmp_path / "steps" / "global_step3_universal"
    directory.parent.mkdir()
    done(ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", "--universal", directory))
    return directory


@every("case", spread(CASES, 9))
def test_what_is_written_converts_to_the_same_weights_and_states(case: str, tmp_path: Path) -> None:
    source, universal = ZERO / case / "checkpoint", tmp_path / "universal"
    outputs = []
    for checkpoint, options in ((source, ["--universal", universal]), (universal, [])):
        weights, states = (tmp_path / f"{len(outputs)}.{name}.safetensors" for name in ("weights", "states"))
        done(ckptconv_here("zero-to-fp32", checkpoint, weights, "--optimizer", states, *options))
        outputs.append((load_with_aliases(weights), load_with_aliases(states)))
    for got, expected in zip(*outputs, strict=True):
        assert_same(got, expected)


def test_a_universal_checkpoint_is_of_one_tag(tmp_path: Path) -> None:
    directory = universal_of("z2_bf16_w2", tmp_path)
    run = ckptconv_here("zero-to-fp32", directory, tmp_path / "out", "--tag", "global_step2")
    assert run.code == 2
    assert f"{directory} is the directory of a tag, but --tag specifies the tag 'global_step2'." in run.err
    assert ckptconv_here("zero-to-fp32", directory, tmp_path / "out", "--tag", directory.name).code == 0


def test_where_latest_universal_leads_is_told(tmp_path: Path) -> None:
    directory = universal_of("z2_bf16_w2", tmp_path)
    told = f"Took {directory}: the universal checkpoint in `latest_universal`."
    assert told in ckptconv_here("zero-to-fp32", directory.parent, tmp_path / "out").out
    assert told not in ckptconv_here("zero-to-fp32", directory, tmp_path / "out").out


def test_options_that_change_tensors_are_said_to_change_nothing_in_it(tmp_path: Path) -> None:
    checkpoint, directory = ZERO / "z2_bf16_w2" / "checkpoint", tmp_path / "universal"
    options = ["--universal", directory, "--dtype", "bf16", "--strip-prefix", "l1.", "--include", "l1.*"]
    run = ckptconv_here("zero-to-fp32", checkpoint, *options)
    assert [line.split(": ")[2].split(" has no effect on")[0] for line in run.err.splitlines()] == [
        "--dtype",
        "--include",
        "--strip-prefix 'l1.'",
    ]
    # With weights beside it, they are for these.
    run = ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "out", *options)
    assert (run.code, run.err) == (0, "")


def test_zero_2_has_a_dict_and_the_step_for_every_parameter(tmp_path: Path) -> None:
    directory = universal_of("z2_bf16_w2", tmp_path)
    assert (directory.parent / "latest_universal").read_text() == directory.name
    parameter = directory / "zero" / "l1.weight"
    assert sorted(path.name for path in parameter.iterdir()) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
    loaded = torch.load(parameter / "fp32.pt", weights_only=True)
    assert set(loaded) == {"cat_dim", "param"}
    assert loaded["cat_dim"] == 0
    assert (loaded["param"].shape, loaded["param"].dtype) == ((7, 6), torch.float32)
    assert torch.load(parameter / "step.pt", weights_only=True) == 3
    # What no optimizer trains has its value and no more, as DeepSpeed 0.19 writes it.
    tied = torch.load(directory / "zero" / "head.weight" / "fp32.pt", weights_only=True)
    assert set(tied) == {"param"}
    model = "mp_rank_00_model_states.pt"
    assert (directory / model).read_bytes() == (tag_of(ZERO / "z2_bf16_w2/checkpoint") / model).read_bytes()


def test_zero_3_has_flat_tensors_and_its_steps_among_the_common_entries(tmp_path: Path) -> None:
    directory = universal_of("z3_bf16_w2", tmp_path)
    parameter = directory / "zero" / "l1.weight"
    assert sorted(path.name for path in parameter.iterdir()) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt"]
    assert torch.load(parameter / "fp32.pt", weights_only=True).shape == (42,)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [
        ".ckptconv-manifest.json",
        "zero",
        *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)),
    ]


def test_it_is_found_by_the_directory_that_names_it(tmp_path: Path) -> None:
    directory = universal_of("z2_bf16_w2", tmp_path)
    for place in (directory, directory.parent):
        run = done(ckptconv_here("zero-to-fp32", place, tmp_path / "model.safetensors", "--json"))
        assert run.json["input"] == str(directory)
    done(ckptconv_here("zero-to-fp32", directory.parent, tmp_path / "model.safetensors", "-t", directory.name))


def test_an_earlier_one_is_replaced_whole_and_another_directory_is_not(tmp_path: Path) -> None:
    directory = universal_of("z2_bf16_w2", tmp_path)
    done(ckptconv_here("zero-to-fp32", ZERO / "z2_bf16_sgd_w2/checkpoint", "--universal", directory))
    assert (directory / "zero/l1.weight/momentum_buffer.pt").exists()
    assert not (directory / "zero/l1.weight/exp_avg.pt").exists()
    assert sorted(path.name for path in directory.parent.iterdir()) == [directory.name, "latest_universal"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("theirs")
    run = ckptconv_here("zero-to-fp32", ZERO / "z2_bf16_w2/checkpoint", "--universal", other)
    assert run.code == 2
    assert "another kind" in run.err
    assert [path.name for path in other.iterdir()] == ["precious"]


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    directory = universal_of("z2_bf16_w2", tmp_path)
    for path in (directory / "zero/l1.weight").iterdir():
        path.unlink()
    (directory / "zero/l1.weight").rmdir()
    run = ckptconv_here("zero-to-fp32", directory, tmp_path / "model.safetensors")
    assert run.code == 4
    assert "l1.weight" in run.err


def test_weights_that_are_missing_or_named_elsewhere_are_refused(tmp_path: Path) -> None:
    directory = universal_of("z2_bf16_w2", tmp_path)
    latest = directory.parent / "latest_universal"
    for text, code, words in (
        ("nowhere", 4, "contains 'nowhere', but no directory of this name is next to it"),
        ("../steps", 3, "which is outside its directory"),
    ):
        latest.write_text(text)
        run = ckptconv_here("zero-to-fp32", directory.parent, tmp_path / "model.safetensors")
        assert (run.code, words in run.err) == (code, True), run.err
    (directory / "zero/l1.weight/fp32.pt").unlink()
    run = ckptconv_here("zero-to-fp32", directory, tmp_path / "model.safetensors")
    assert run.code == 4
    assert "l1.weight has no fp32.pt: the weights of 'l1.weight' are missing" in run.err


def test_nothing_is_left_of_one_that_failed(tmp_path: Path) -> None:
    checkpoint = copy_of("z2_bf16_w2", tmp_path)
    optim = tag_of(checkpoint) / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    optim.write_bytes(optim.read_bytes()[:-100])
    run = ckptconv_here("zero-to-fp32", checkpoint, "--universal", tmp_path / "universal")
    assert run.code == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


@every("name, code", [("l\ud800", 5), ("é" * 130, 5), ("a/b", 3), ("..", 3), ("a\0b", 3)])
def test_a_parameter_whose_name_no_directory_can_have_is_told(name: str, code: int, tmp_path: Path) -> None:
    for stage in (1, 3):
        model = Model([{name: values(3, 2), "other": values(4)}])
        checkpoint = write(tmp_path / f"c{stage}", model, Save(stage=stage))
        run = ckptconv_here("zero-to-fp32", checkpoint, "--universal", tmp_path / "universal")
        assert run.code == code, run.err
        assert repr(name[:100])[:-1] in run.err
        assert not list(tmp_path.glob("universal*")), "nothing is written"
        assert "Traceback" not in run.err
