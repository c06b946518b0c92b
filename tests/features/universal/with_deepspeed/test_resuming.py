"""Universal checkpoints of anything: what DeepSpeed resumes from, made of weights with an optimizer or without one.

`make test-deepspeed` has DeepSpeed train on from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cells import VERIFIED, VERIFY, verified_here, verifying
from checkpoints import ZERO, assert_same, ckptconv_here, done, load_with_aliases
from effort import every
from optimizer_files import FORMS, STEPS, by_name, muon_saved, network, trained, training_saved
from safetensors.torch import load_file, save_file
from stores import FAR

import ckptconv
from ckptconv.cli.registered import COMMANDS
from ckptconv.errors import UsageError
from ckptconv.options.table import OPTIONS

MODEL, MODEL_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
COMMON = "zero/optimizer_state.pt"


def hugging_face(directory: Path) -> dict[str, torch.Tensor]:
    """Save a model as Hugging Face's libraries do, in bf16; return its tensors."""
    directory.mkdir()
    state = {
        name: each.bfloat16() if each.is_floating_point() else each for name, each in network().state_dict().items()
    }
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return state


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def read_back(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights and the states, by name, that a universal checkpoint is read as."""
    weights, states = directory.with_suffix(".safetensors"), directory.with_suffix(".states.safetensors")
    done(ckptconv_here("zero-to-fp32", directory, weights, "--optimizer", states))
    return load_with_aliases(weights), load_file(states)


def refused(run: Any, code: int, *words: str) -> None:
    assert run.code == code, run.err
    assert all(word in run.err for word in words), run.err
    assert "Traceback" not in run.err


def test_weights_become_fp32_masters_with_zero_moments_at_step_0(tmp_path: Path) -> None:
    state, out = hugging_face(tmp_path / "hf"), tmp_path / "universal"
    run = done(ckptconv_here("convert", tmp_path / "hf", "--universal", out, *VERIFY))
    assert "starts with zero moments at step 0" in run.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "latest_universal", "universal"]
    assert (tmp_path / "latest_universal").read_text() == "universal"
    parameter = out / "zero" / "0.weight"
    master = loaded(parameter / "fp32.pt")
    assert master.keys() == {"cat_dim", "param"}
    assert master["param"].dtype == torch.float32
    assert torch.equal(master["param"], state["0.weight"].float())
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(loaded(parameter / f"{key}.pt")["param"], torch.zeros(7, 5))
    step = loaded(parameter / "step.pt")
    assert (step.item(), step.dtype) == (0, torch.float32), "as torch's optimizers have it"
    assert not (out / "zero" / "count").exists(), "a buffer is no parameter"
    weights, states = read_back(out)
    assert_same(weights, {name: each.float() if each.is_floating_point() else each for name, each in state.items()})
    assert not any(each.any() for each in states.values())


def test_moments_that_are_zero_take_no_room(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1000, 1000)}, tmp_path / "m.safetensors")
    assert ckptconv_here("convert", tmp_path / "m.safetensors", "--universal", tmp_path / "u").code == 0
    parameter = tmp_path / "u" / "zero" / "weight"
    assert (parameter / "exp_avg.pt").stat().st_size < 2000
    moment = loaded(parameter / "exp_avg.pt")["param"]
    assert torch.equal(moment.view(-1).narrow(0, 7, 100).clone(), torch.zeros(100)), "as DeepSpeed takes it apart"


def test_every_stage_finds_what_it_loads(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    files = {}
    for stage in ("", 1, 2, 3):
        out = tmp_path / f"u{stage}"
        done(ckptconv_here("convert", tmp_path / "hf", "--universal", out, *(["--zero-stage", stage] if stage else [])))
        files[stage] = sorted(path.name for path in out.iterdir() if path.is_file() and path.suffix == ".pt")
        verified_here(tmp_path / "hf", "--universal", out)
    assert files == {"": [MODEL, MODEL_3], 1: [MODEL], 2: [MODEL], 3: [MODEL_3]}
    parameter = tmp_path / "u3" / "zero" / "0.weight"
    assert sorted(path.name for path in parameter.iterdir()) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt"]
    assert [loaded(path).shape for path in sorted(parameter.iterdir())] == [(35,)] * 3
    assert_same(read_back(tmp_path / "u3")[0], read_back(tmp_path / "u")[0])


def test_deepspeed_s_loader_finds_every_entry_it_asks_for(tmp_path: Path) -> None:
    """Those that _load_checkpoint and load_hp_checkpoint_state_from_checkpoint_dir index without a default."""
    hugging_face(tmp_path / "hf")
    assert ckptconv_here("convert", tmp_path / "hf", "--universal", tmp_path / "u").code == 0
    model, common = loaded(tmp_path / "u" / MODEL), loaded(tmp_path / "u" / COMMON)
    assert (model["dp_world_size"], model["mp_world_size"]) == (1, 1)
    assert (model["global_steps"], model["skipped_steps"]) == (0, 0)
    assert model["lr_scheduler"]["last_batch_iteration"] == -1
    assert model["module"].keys() == {"count"}
    assert model["param_shapes"][0]["0.weight"] == torch.Size((7, 5))
    assert common["ds_version"]
    # Parameters of a group that is not named here are not loaded: there are as many as there can be.
    assert common["param_groups"] == [{}] * 6
    assert common["optimizer_state_dict"]["state"][0]["step"] == 0
    assert common["optimizer_state_dict"]["param_groups"] == [{"params": [0]}]


@every("form", FORMS)
def test_a_training_checkpoint_of_torch_goes_on_with_its_moments(form: str, tmp_path: Path) -> None:
    groups = 1 if form == "numbers" else 2
    state, out = training_saved(tmp_path / "t.pt", form, groups), tmp_path / "u"
    run = done(ckptconv_here("pt2safetensors", tmp_path / "t.pt", "--universal", out, *VERIFY))
    assert "continues at step 3" in run.out
    weights, states = read_back(out)
    assert_same(weights, state["model"])
    assert_same(states, by_name(state))
    model, common = loaded(out / MODEL), loaded(out / COMMON)
    assert (model["global_steps"], model["lr_scheduler"]["last_batch_iteration"]) == (3, 2)
    hyper = common["param_groups"]
    assert [group["lr"] for group in hyper[:groups]] == [0.1, 0.2][:groups]
    assert hyper[groups:] == [{}] * (6 - groups)
    assert not hyper[0].keys() & {"params", "param_names", "fused", "foreach"}
    verified_here(tmp_path / "t.pt", "--universal", out)


@pytest.mark.skipif("dcp2safetensors" not in COMMANDS, reason="there are no directories of ranks")
def test_a_distributed_checkpoint_goes_on_with_its_moments(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = trained()
    states, optim = get_state_dict(model, optimizer)
    save({"model": states, "optim": optim}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    out = tmp_path / "u"
    done(ckptconv_here("dcp2safetensors", tmp_path / "dcp", "--universal", out, *VERIFY))
    weights, moments = read_back(out)
    assert_same(weights, dict(model.state_dict()))
    assert_same(moments, by_name({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert loaded(out / MODEL)["global_steps"] == STEPS
    assert ckptconv_here("dcp2safetensors", tmp_path / "dcp", "--universal", out, "--fresh-optimizer").code == 0
    assert not any(each.any() for each in read_back(out)[1].values())
    verified_here(tmp_path / "dcp", "--universal", out)


def hyperparameters(common: Any) -> list[list[Any]]:
    """The learning rates that ZeRO-1 and 2 take from a universal checkpoint, and those that ZeRO-3 takes."""
    places = common["param_groups"], common["optimizer_state_dict"]["param_groups"]
    return [[group["lr"] for group in groups if "lr" in group] for groups in places]


def test_zero_3_keeps_the_run_s_own_settings_where_groups_differ(tmp_path: Path) -> None:
    """It gives all groups what the first of a checkpoint has."""
    training_saved(tmp_path / "t.pt", groups=2)
    for stage, kept in (("", []), ("3", []), ("1", [0.1, 0.2])):
        options = ["--zero-stage", stage] if stage else []
        run = done(
            ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / f"u{stage}", *options, *VERIFY)
        )
        common = loaded(tmp_path / f"u{stage}" / COMMON)
        assert hyperparameters(common) == [[0.1, 0.2], kept]
        assert ("2 groups of parameters differ in lr. ZeRO-3" in run.err) is (not kept)
        assert all("betas" in group for group in common["optimizer_state_dict"]["param_groups"]), "which all have"


def test_zero_3_takes_the_settings_of_a_single_group(tmp_path: Path) -> None:
    training_saved(tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
    assert (run.code, run.err) == (0, "")
    assert hyperparameters(loaded(tmp_path / "u" / COMMON)) == [[0.1], [0.1]]


@every("case, stages", [("z3_bf16_w2", "for ZeRO-3"), ("z2_bf16_w2", "for ZeRO-1 and 2")])
def test_that_of_a_zero_checkpoint_says_for_which_stages_it_is(case: str, stages: str, tmp_path: Path) -> None:
    run = ckptconv_here("zero-to-fp32", ZERO / case / "checkpoint", "--universal", tmp_path / "u")
    assert f"The universal checkpoint is {stages}, like INPUT. For ZeRO-" in run.out


def test_a_zero_checkpoint_is_made_for_another_stage(tmp_path: Path) -> None:
    checkpoint = ZERO / "z2_bf16_w2" / "checkpoint"
    for name, options in (("own", []), ("u3", ["--zero-stage", "3"])):
        assert ckptconv_here("zero-to-fp32", checkpoint, "--universal", tmp_path / name, *options).code == 0
    assert loaded(tmp_path / "u3" / "zero" / "l1.weight" / "exp_avg.pt").shape == (42,)
    for got, expected in zip(read_back(tmp_path / "u3"), read_back(tmp_path / "own"), strict=True):
        assert_same({name: each for name, each in got.items() if not name.endswith(".step")},
                    {name: each for name, each in expected.items() if not name.endswith(".step")})  # fmt: skip
    assert loaded(tmp_path / "u3" / COMMON)["optimizer_state_dict"]["state"][0]["step"] == 3


@every(
    "parameter, state, code",
    [
        ("optimizer_state.pt", "exp_avg", 5),
        ("w", "fp32", 5),
        ("w", "x" * 300, 5),
        ("w", "\ud800", 5),
        ("w", "a\0b", 3),
        ("w", "a/b", 3),
        ("w", "../" * 30 + "{home}/evil", 3),
        ("a/b", "exp_avg", 3),
    ],
)
def test_a_name_that_no_file_of_its_own_can_have_is_refused(
    parameter: str, state: str, code: int, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    state = state.replace("{home}", str(home)[1:])
    states = {"state": {parameter: {state: torch.zeros(3)}}, "param_groups": [{"params": [parameter]}]}
    torch.save({"model": {parameter: torch.ones(3)}, "optimizer": states}, tmp_path / "x.pt")
    run = ckptconv_here("convert", tmp_path / "x.pt", "--universal", tmp_path / "u")
    run.refused(code, "has the name", "Nothing was written")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["home", "x.pt"]


def test_names_are_chosen_and_changed_as_for_weights(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt")
    options = ["--rename", "^0=first", "--exclude", "1.*", "--dtype", "bf16"]
    run = done(ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u", *options))
    assert "--dtype has no effect on a universal checkpoint" in run.err
    weights, states = read_back(tmp_path / "u")
    assert sorted(weights) == ["2.bias", "2.weight", "count", "first.bias", "first.weight"]
    assert torch.equal(states["first.weight.exp_avg"], by_name(state)["0.weight.exp_avg"])


def test_tied_weights_are_there_once_under_the_first_name(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    torch.save({"embed.weight": weight, "head.weight": weight}, tmp_path / "m.pt")
    assert ckptconv_here("convert", tmp_path / "m.pt", "--universal", tmp_path / "u").code == 0
    names = sorted(path.name for path in (tmp_path / "u" / "zero").iterdir())
    assert names == ["embed.weight", "optimizer_state.pt"]
    assert loaded(tmp_path / "u" / MODEL)["shared_params"] == {"head.weight": "embed.weight"}
    assert read_back(tmp_path / "u")[0].keys() == {"embed.weight", "head.weight"}


def test_a_parameter_without_states_begins_with_zero_moments(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt")
    del state["optimizer"]["state"]["0.bias"]
    torch.save(state, tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
    said = "Zero moments were written for parameters without states: 0.bias"
    assert (run.code, said in run.err.replace("'", "")) == (0, True)
    parameter = tmp_path / "u" / "zero" / "0.bias"
    assert loaded(parameter / "step.pt") == STEPS, "DeepSpeed refuses groups whose parameters differ in it"
    assert not loaded(parameter / "exp_avg.pt")["param"].any()


def test_states_of_several_optimizers_stay_those_of_their_groups(tmp_path: Path) -> None:
    expected = muon_saved(tmp_path / "t.pt")
    run = done(ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u", *VERIFY))
    for words in ("ZeRO-3 loads exactly 'exp_avg', 'exp_avg_sq' of each parameter.", "for ZeRO-1 and 2."):
        assert words in run.err
    assert "fail in the first step with Muon" in run.err
    assert not (tmp_path / "u" / MODEL_3).exists(), "ZeRO-3 says that it is not there"
    found = read_back(tmp_path / "u")[1]
    assert_same(found, expected)
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u3", "--zero-stage", 3)
    refused(run, 5, "ZeRO-3 loads", "--fresh-optimizer")


def test_deepspeed_has_one_number_of_steps_for_a_group(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt")
    state["optimizer"]["state"]["0.bias"]["step"] = torch.tensor(1.0)
    torch.save(state, tmp_path / "t.pt")
    run = done(ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u", *VERIFY))
    assert "Parameters have fewer steps than others in their group (3): '0.bias'." in run.err
    assert {float(loaded(path)) for path in (tmp_path / "u" / "zero").glob("*/step.pt")} == {3.0}
    assert loaded(tmp_path / "u" / MODEL)["global_steps"] == 3


def test_experts_are_found_by_their_numbers_on_a_rank_and_a_warning_says_so(tmp_path: Path) -> None:
    names = [f"moe.deepspeed_moe.experts.deepspeed_experts.{number}.weight" for number in range(2)]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "m.pt")
    run = ckptconv_here("convert", tmp_path / "m.pt", "--universal", tmp_path / "u")
    assert (run.code, "ep_size=1" in run.err) == (0, True)


def test_states_that_zero_cannot_have_are_refused(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt")
    state["optimizer"]["state"]["0.weight"]["exp_avg_sq_row"] = torch.zeros(7)
    torch.save(state, tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
    refused(run, 5, "'exp_avg_sq_row' of '0.weight' has the shape [7]", "--fresh-optimizer")
    del state["optimizer"]["state"]["0.weight"]["exp_avg_sq_row"]
    state["optimizer"]["state"]["0.weight"] |= {"exp_avg": {"blocks": torch.zeros(7)}, "mu_product": torch.tensor(0.9)}
    torch.save(state, tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
    refused(run, 5, "'exp_avg' of '0.weight' is not a plain tensor")
    # States of 8 bits, as bitsandbytes has them, whatever comes first.
    for form in FORMS:
        state = training_saved(tmp_path / "t.pt", form)
        for number, held in state["optimizer"]["state"].items():
            codes = held["exp_avg"].to(torch.uint8)
            eight = {"qmap1": torch.zeros(256), "state1": codes, "absmax1": torch.zeros(1), "step": held["step"]}
            state["optimizer"]["state"][number] = eight
        torch.save(state, tmp_path / "t.pt")
        run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
        refused(run, 5, "'qmap1' of '0.weight' has the shape [256]", "--fresh-optimizer")


def test_a_model_beside_an_optimizer_is_named_if_its_key_is_not_a_usual_one(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt")
    torch.save({"nets": {"main": state["model"]}, "optimizer": state["optimizer"]}, tmp_path / "t.pt")
    for options in ([], ["--fresh-optimizer"], ["--key", "."]):
        run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u", *options)
        refused(run, 2, "an optimizer under 'optimizer'", "Select the model with --key; the keys are: 'nets'.")
    done(ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u", "--key", "nets.main"))
    assert_same(read_back(tmp_path / "u")[1], by_name(state))


@every(
    "key, value",
    [
        ("param_groups", [{"params": [[1], {"a": 1}]}]),
        ("param_groups", [{}] * 2000),
        ("param_groups", [{"params": [0, 0, 0]}]),
        ("param_groups", [{"params": [0, 1], "param_names": ["../x", 3]}]),
        ("state", {0: 3, "x": {"step": "three"}, 1: {"step": torch.zeros(3)}}),
        ("state", {0: {"step": float("nan"), "exp_avg": None}}),
    ],
)
def test_an_optimizer_that_makes_no_sense_is_an_error_of_one_sentence(key: str, value: Any, tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt")
    state["optimizer"][key] = value
    torch.save(state, tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
    assert (run.code in (0, 2, 3, 4, 5), "Traceback" in run.err) == (True, False), run.err
    if run.code:
        assert [path.name for path in tmp_path.iterdir()] == ["t.pt"]


@verifying
def test_what_does_not_belong_to_it_is_found(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    assert ckptconv_here("convert", tmp_path / "hf", "--universal", tmp_path / "u").code == 0
    (tmp_path / "u" / "empty").mkdir()
    verified_here(tmp_path / "hf", "--universal", tmp_path / "u")
    for more in ("zero/0.weight/more.pt", "zero/0.weight/deep/down", "other/deep/down"):
        (tmp_path / "u" / more).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "u" / more).write_text("x")
        run = ckptconv_here("verify", tmp_path / "hf", "--universal", tmp_path / "u")
        refused(run, 1, "is not part of the output", "/".join(more.split("/")[: 1 if more[0] == "o" else 3]))
        (tmp_path / "u" / more).unlink()


def test_what_has_no_parameters_is_refused(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(3)}, tmp_path / "m.safetensors")
    refused(
        ckptconv_here("convert", tmp_path / "m.safetensors", "--universal", tmp_path / "u"), 2, "contains no parameter"
    )
    for option in (["--zero-stage", 3], ["--fresh-optimizer"]):
        run = ckptconv_here("convert", tmp_path / "m.safetensors", tmp_path / "out", *option)
        refused(run, 2, f"{option[0]} applies only to a universal checkpoint.", "--universal DIR")


@verifying
@FAR
def test_a_universal_checkpoint_on_a_store_has_its_name_last(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    place = "memory://universal/runs/step3"
    state = training_saved(tmp_path / "t.pt")
    try:
        ckptconv.convert(tmp_path / "t.pt", universal=place, **VERIFIED)
        assert store.cat("/universal/runs/latest_universal") == b"step3"
        assert ckptconv.verify(tmp_path / "t.pt", universal=place).tensors == 27
        ckptconv.convert(place, tmp_path / "back.safetensors")
        assert_same(load_with_aliases(tmp_path / "back.safetensors"), state["model"])
        # An earlier one is replaced whole; parts leave the new one without its name until they are finished.
        store.pipe("/universal/runs/step3/zero/old/fp32.pt", b"x")
        hugging_face(tmp_path / "hf")
        with pytest.raises(UsageError, match=r"files of another kind, such as zero/old/fp32.pt\."):
            ckptconv.convert(tmp_path / "hf", universal=place)
        store.rm("/universal/runs/step3/zero/old/fp32.pt")
        if "part" in OPTIONS:
            for part in ("0/2", "1/2"):
                ckptconv.convert(tmp_path / "hf", universal=place, part=part)
                assert not store.exists("/universal/runs/latest_universal")
            ckptconv.finish(place)
        else:
            ckptconv.convert(tmp_path / "hf", universal=place)
        assert store.cat("/universal/runs/latest_universal") == b"step3"
        assert ckptconv.verify(tmp_path / "hf", universal=place).tensors == 27
        store.pipe("/universal/other/precious", b"x")
        with pytest.raises(UsageError, match="files of another kind"):
            ckptconv.convert(tmp_path / "hf", universal="memory://universal/other")
        with pytest.raises(UsageError, match="a file is written next to it"):
            ckptconv.convert(tmp_path / "hf", universal="memory://universal")
    finally:
        store.rm("/universal", recursive=True)


@verifying
@FAR
def test_one_that_fails_on_a_store_goes_on_where_it_was(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    place = "memory://stopped/runs/step3"
    training_saved(tmp_path / "t.pt")

    class Stopped:
        files = 0

        def __call__(self, count: int) -> None: ...

        def on_file(self, name: str) -> None:
            self.files += 1
            if self.files == 9:
                raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            ckptconv.convert(tmp_path / "t.pt", universal=place, progress=Stopped(), jobs=1)
        assert not store.exists("/stopped/runs/latest_universal")
        assert ckptconv.convert(tmp_path / "t.pt", universal=place).reused in (7, 8), "one may not be recorded yet"
        assert ckptconv.verify(tmp_path / "t.pt", universal=place).tensors == 27
        assert not [path for path in store.find("/stopped") if ".record-" in path]
    finally:
        store.rm("/stopped", recursive=True)
