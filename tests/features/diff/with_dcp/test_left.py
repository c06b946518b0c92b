"""A comparison of steps of training names the parts that it left out, each once."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import ckptconv


def test_the_states_and_the_trainers_values_are_named_once(tmp_path: Path) -> None:
    for number in (1, 2):
        state = {"w": torch.ones(2), "optimizer.state.w.exp_avg": torch.full((2,), float(number))}
        state["train_state"] = {"step": torch.tensor(number)}
        dcp.save(state, checkpoint_id=str(tmp_path / f"step-{number}"), no_dist=True)
    report = ckptconv.diff(tmp_path / "step-1", tmp_path / "step-2")
    assert report.equal
    (states,) = (text for text in report.hints if text.startswith("Not compared: 'optimizer' (1 tensor)."))
    assert "Use --with-states for the optimizer states" in states
    assert len([text for text in report.warnings if "train_state" in text]) == 1
    every = ckptconv.diff(tmp_path / "step-1", tmp_path / "step-2", with_states=True)
    assert not every.equal
    assert not [text for text in (*every.hints, *every.warnings) if "'optimizer'" in text]
