"""The states of optimizers beside weights whose names are stored in the place of numbers, as FSDP has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import VERIFY, opened
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from optimizer_files import by_name, muon_saved, trained, training_saved
from safetensors.torch import load_file, save_file

from ckptconv.formats import registered


@every("groups", [1, 2])
def test_states_keep_their_names_in_every_output(groups: int, tmp_path: Path) -> None:
    expected = by_name(training_saved(tmp_path / "t.pt", groups=groups))
    done(ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "states.safetensors", *VERIFY))
    assert_same(load_file(tmp_path / "states.safetensors"), expected)
    for checkpoint in opened(tmp_path / "t.pt"):
        assert_same({name: each.torch() for name, each in checkpoint.optimizer.items()}, expected)


def test_states_without_an_output_of_the_weights_are_said_to_be_alone(tmp_path: Path) -> None:
    note = "Not converted: the weights. To convert them, give OUTPUT after INPUT."
    training_saved(tmp_path / "t.pt")
    states = ("--optimizer", tmp_path / "states.safetensors")
    assert note in done(ckptconv_here("convert", tmp_path / "t.pt", *states)).out.splitlines()
    assert note not in done(ckptconv_here("convert", tmp_path / "t.pt", tmp_path / "t.safetensors", *states)).out
    assert note not in done(ckptconv_here("convert", tmp_path / "t.pt", tmp_path / "t.safetensors")).out


def test_two_optimizers_share_the_parameters_and_no_state(tmp_path: Path) -> None:
    expected = muon_saved(tmp_path / "t.pt")
    done(ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "states.safetensors"))
    assert_same(load_file(tmp_path / "states.safetensors"), expected)
    saved = torch.load(tmp_path / "t.pt")
    torch.save({**saved, "optimizers": saved["optimizers"] * 2}, tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "again.safetensors")
    run.refused(4, "two of its optimizers contain a state of '0.weight'")


def test_the_prefix_of_a_wrapper_is_no_part_of_a_name(tmp_path: Path) -> None:
    weights = {"a.weight": torch.zeros(3, 2), "b": torch.zeros(2)}
    held = {f"module.{name}": {"exp_avg": torch.ones_like(each)} for name, each in weights.items()}
    optimizer = {"state": held, "param_groups": [{"lr": 0.1, "params": [*held]}]}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "t.pt")
    done(ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "states.safetensors"))
    assert load_file(tmp_path / "states.safetensors").keys() == {"a.weight.exp_avg", "b.exp_avg"}


def test_numbers_are_refused_by_name_without_the_feature_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "NUMBERS", "absent")
    training_saved(tmp_path / "t.pt", "numbers")
    words = ["convert", tmp_path / "t.pt"]
    run = ckptconv_here(*words, "--optimizer", tmp_path / "states.safetensors")
    run.refused(5, "t.pt: the optimizer numbers its parameters", "needs the feature absent, which is not installed")
    done(ckptconv_here(*words, tmp_path / "weights.safetensors"))
    # In a file next to the model.
    model, optimizer = trained()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "step").mkdir()
    save_file(model.state_dict(), tmp_path / "step" / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "step" / "optimizer.pt")
    for path in (tmp_path / "step", tmp_path / "step" / "model.safetensors"):
        run = ckptconv_here("convert", path, "--optimizer", tmp_path / "states.safetensors")
        run.refused(5, "the states in optimizer.pt", "needs the feature absent, which is not installed")
    run = done(ckptconv_here("convert", tmp_path / "step", tmp_path / "out"))
    assert "the states in optimizer.pt" in run.out
    assert not (tmp_path / "states.safetensors").exists()


def test_an_optimizer_whose_file_has_no_model_is_not_said_to_have_one_under_a_key(tmp_path: Path) -> None:
    optimizer = training_saved(tmp_path / "t.pt")["optimizer"]
    torch.save({"optimizer": optimizer, "epoch": 3}, tmp_path / "o.pt")
    words = ("convert", tmp_path / "o.pt", "--optimizer", tmp_path / "states.safetensors")
    said = ckptconv_here(*words).refused(2, "It has no other tensors; without --optimizer, it is converted as it is.")
    assert "--key" not in said
