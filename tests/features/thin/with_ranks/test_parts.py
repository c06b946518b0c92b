"""Entries of the files of ranks that a reduced step would lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from features.thin.reduced import kept, reduced


@pytest.mark.parametrize("is_weight", [True, False])
def test_entries_next_to_the_model_are_named_and_weights_keep_the_step(is_weight: bool, tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(4, 4)}
    more = {"ema": {"a.weight": torch.zeros(4, 4)}} if is_weight else {"epoch": 3}
    for number in (1, 2):
        step = tmp_path / "run" / f"step-{number}"
        step.mkdir(parents=True)
        for rank in range(2):
            torch.save({"model": weights, **more}, step / f"model_world_size_2_rank_{rank}.pt")
    expected = kept("ema") if is_weight else {"action": "lessen", "why": [], "lost": ["epoch"]}
    assert reduced(tmp_path / "run") == expected
