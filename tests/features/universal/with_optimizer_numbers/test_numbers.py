"""Universal checkpoints of trainings whose optimizer numbers its parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here, done
from optimizer_files import trained, training_saved

MODEL = "mp_rank_00_model_states.pt"


def test_numbers_that_could_be_of_several_parameters_are_refused(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt", "numbers")
    # A buffer that looks like a bias.
    weight = state["model"].pop("0.weight")
    state["model"] = {"0.weight": weight, "0.running_mean": torch.zeros(7), **state["model"]}
    torch.save(state, tmp_path / "t.pt")
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
    run.refused(5, "numbers its 6 parameters", "the model has 7 tensors", "--fresh-optimizer", "named_parameters()")
    assert [path.name for path in tmp_path.iterdir()] == ["t.pt"]
    done(ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u", "--fresh-optimizer"))
    # With names there is no doubt, and what is not the optimizer's is no parameter.
    state = training_saved(tmp_path / "t.pt", "recorded")
    state["model"]["running_mean"] = torch.zeros(7)
    torch.save(state, tmp_path / "t.pt")
    assert ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u").code == 0
    assert torch.load(tmp_path / "u" / MODEL, weights_only=True)["module"].keys() == {"count", "running_mean"}


def test_two_optimizers_of_all_parameters_are_refused(tmp_path: Path) -> None:
    both = [each.state_dict() for _, each in (trained(), trained())]
    training_saved(tmp_path / "t.pt", optimizer=both)
    run = ckptconv_here("convert", tmp_path / "t.pt", "--universal", tmp_path / "u")
    run.refused(5, "numbers its 12 parameters in 2 groups")
