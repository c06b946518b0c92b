"""The states of optimizers beside weights, by number: by the names of these, in every output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFY, opened
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from optimizer_files import by_name, muon_saved, training_saved
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import UsageError, convert


def refused(run: Any, code: int, *words: str) -> None:
    assert run.code == code, run.err
    assert all(word in run.err for word in words), run.err
    assert "Traceback" not in run.err


@every("form, groups", [("numbers", 1), ("recorded", 1), ("recorded", 2)])
def test_states_beside_weights_have_the_same_names_in_every_output(form: str, groups: int, tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt", form, groups)
    expected = by_name(state)
    done(ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "states.safetensors", *VERIFY))
    assert_same(load_file(tmp_path / "states.safetensors"), expected)
    for checkpoint in opened(tmp_path / "t.pt"):
        assert_same({name: each.torch() for name, each in checkpoint.optimizer.items()}, expected)


def test_numbers_that_nothing_names_are_refused_in_every_output(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt", "numbers")
    state["model"]["3.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "t.pt")
    words = "numbers its 6 parameters", "The states cannot be matched to parameters", "named_parameters()"
    refused(ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "s.safetensors"), 5, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["t.pt"]


def test_factors_of_a_square_parameter_are_not_taken_for_states_of_a_vector(tmp_path: Path) -> None:
    model = {"norm": torch.zeros(4), "square": torch.zeros(4, 4)}
    states = {0: {"exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(4), "step": 1}}
    optimizer = {"state": states, "param_groups": [{"lr": 1.0, "params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "s.safetensors")
    refused(run, 5, "The states cannot be matched to parameters: ")


def test_two_optimizers_in_a_file_share_the_parameters(tmp_path: Path) -> None:
    expected = muon_saved(tmp_path / "t.pt", "numbers")
    done(ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "s.safetensors", *VERIFY))
    assert_same(load_file(tmp_path / "s.safetensors"), expected)
    saved = torch.load(tmp_path / "t.pt")
    muon, adamw = saved.pop("optimizers")
    by_name = {"muon": muon, "adamw": adamw}
    for name, state, words in (
        ("keys", {**saved, **by_name}, []),
        ("dict", {**saved, "optimizers": by_name}, []),
        ("nested", {"state": {**saved, "optimizers": by_name}, "rng": 1}, ["--key", "state.model", tmp_path / "w"]),
    ):
        torch.save(state, tmp_path / f"{name}.pt")
        states = tmp_path / f"{name}.safetensors"
        done(ckptconv_here("convert", tmp_path / f"{name}.pt", *words, "--optimizer", states))
        assert_same(load_file(states), expected)


def test_states_beside_a_model_to_publish_are_not_advised(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model" / "model.safetensors")
    torch.save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, tmp_path / "model" / "optimizer.pt")
    notes = convert(tmp_path / "model", tmp_path / "all").notes
    assert any("--optimizer PATH" in note for note in notes)
    notes = convert(tmp_path / "model", tmp_path / "out", for_hub=True).notes
    assert any(note.startswith("Not converted") for note in notes)
    assert not any("--optimizer PATH" in note for note in notes)


def test_states_among_the_weights_that_are_cast_are_told_with_the_option_that_leaves_them_out(tmp_path: Path) -> None:
    training_saved(tmp_path / "t.pt", "numbers")
    for output in ("out.safetensors", "out", "out.pt"):
        (told,) = convert(tmp_path / "t.pt", tmp_path / output, dtype="bf16").warnings
        assert told.partition(" optimizer state")[2].removeprefix("s") == (
            " are also cast to bfloat16, such as 'optimizer.state.0.step'. To leave them out, use "
            "--exclude 'optimizer.*', or --key model for the weights alone."
        ), output
    for options in ({"dtype": "bf16", "exclude": "optimizer.*"}, {"dtype": "bf16", "key": "model"}, {"dtype": "fp32"}):
        report = convert(tmp_path / "t.pt", tmp_path / "again.safetensors", overwrite=True, **options)
        assert report.warnings == [], options


def test_states_are_told_wherever_a_trainer_saves_them(tmp_path: Path) -> None:
    training_saved(tmp_path / "t.pt", "numbers")
    saved = torch.load(tmp_path / "t.pt")
    model, optimizer = saved["model"], saved["optimizer"]
    for state, glob, key in (
        (
            {"state": {"model": model, "optimizers": {"AdamW": optimizer}}, "rng": 1},
            "state.optimizers.*",
            "state.model",
        ),
        ([model, optimizer], "1.*", "0"),
        ({"": {}, "model": model, "optimizer": optimizer}, "optimizer.*", "model"),
    ):
        torch.save(state, tmp_path / "x.pt")
        for output in ("x.safetensors", "y.pt"):
            (told,) = convert(tmp_path / "x.pt", tmp_path / output, dtype="bf16", overwrite=True).warnings
            assert told.endswith(f"To leave them out, use --exclude '{glob}', or --key {key} for the weights alone.")
            for options in ({"exclude": glob}, {"key": key}):
                report = convert(tmp_path / "x.pt", tmp_path / output, dtype="bf16", overwrite=True, **options)
                assert (report.warnings, report.tensors) == ([], len(model)), options


def test_states_without_weights_that_are_cast_are_told(tmp_path: Path) -> None:
    training_saved(tmp_path / "t.pt", "numbers")
    optimizer = torch.load(tmp_path / "t.pt")["optimizer"]
    for number, (state, options) in enumerate(
        (
            (optimizer, {}),
            (optimizer, {"structure": False}),
            ({"optimizer": optimizer}, {}),
            ({"run": {"optimizer": optimizer}, "epoch": 1}, {"key": "run.optimizer"}),
        )
    ):
        source = tmp_path / f"{number}.pt"
        torch.save(state, source)
        convert(source, tmp_path / f"{number}.safetensors", structure=True)
        for path in (source, tmp_path / f"{number}.safetensors"):
            for output in ("x.safetensors", "y.pt"):
                report = convert(path, tmp_path / output, dtype="bf16", overwrite=True, **options)
                (told,) = report.warnings
                assert re.fullmatch(
                    r"\d+ optimizer states are cast to bfloat16, such as '(optimizer\.)?state\.0\.step'\. "
                    r"To keep their dtypes, leave --dtype out\.",
                    told,
                ), (path, output)
                assert convert(path, tmp_path / output, overwrite=True, **options).warnings == []


def test_states_in_both_outputs_are_told(tmp_path: Path) -> None:
    training_saved(tmp_path / "t.pt", "numbers")
    said = "OUTPUT also contains the optimizer states"
    for place, options, is_told in (("a", {}, True), ("b", {"key": "model"}, False)):
        notes = convert(tmp_path / "t.pt", tmp_path / place, optimizer=tmp_path / f"{place}-states", **options).notes
        assert any(note.startswith(said) for note in notes) == is_told, notes
    assert not any(said in note for note in convert(tmp_path / "t.pt", tmp_path / "c").notes)


def test_an_optimizer_without_its_model_is_said_to_be_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    step, states = tmp_path / "step", tmp_path / "states"
    step.mkdir()
    save_file(model.state_dict(), step / "model.safetensors")
    torch.save(optimizer.state_dict(), step / "optimizer.pt")
    assert ckptconv_here("convert", step, tmp_path / "out", "--optimizer", states).code == 0
    for place, fact, advice in (
        (step / "optimizer.pt", "numbered optimizer states", "Specify the directory of the step"),
        (states, "only an optimizer's states by parameter", "convert them without --optimizer"),
    ):
        ckptconv_here("convert", place, tmp_path / "o", "--optimizer", tmp_path / "p").refused(2, fact, advice)
        with ckptconv.open(place) as checkpoint, pytest.raises(UsageError, match=fact):
            list(checkpoint.optimizer)
        # It is converted as it is.
        assert ckptconv_here("convert", place, tmp_path / f"{place.name}.safetensors").code == 0
    (step / "optimizer.pt").unlink()
    ckptconv_here("convert", step, tmp_path / "o", "--optimizer", tmp_path / "p").refused(2, "no optimizer states by")
