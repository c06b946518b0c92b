"""Entries of a client in DeepSpeed's files that a reduced step would lack."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import ZERO
from features.thin.reduced import kept, reduced


def _run(place: Path, client: dict[str, Any]) -> Path:
    for number in (1, 2):
        step = place / f"global_step{number}"
        shutil.copytree(ZERO / "z2_bf16_w2" / "checkpoint" / "global_step3", step)
        model = step / "mp_rank_00_model_states.pt"
        torch.save({**torch.load(model, weights_only=False), **client}, model)
    return place


def test_a_step_with_an_average_of_the_weights_in_its_client_state_stays(tmp_path: Path) -> None:
    assert reduced(_run(tmp_path / "run", {"ema": {"w": torch.ones(4, 4)}})) == kept("ema")


def test_entries_without_weights_are_named_before_they_go(tmp_path: Path) -> None:
    plan = reduced(_run(tmp_path / "run", {"epoch": 3, "rng": torch.get_rng_state(), "lr_scheduler": {"a": 1}}))
    assert plan["action"] == "lessen"
    assert plan["lost"] == ["lr_scheduler", "skipped_steps", "global_steps", "global_samples", "epoch", "rng"]
