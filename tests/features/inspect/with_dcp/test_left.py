"""The parts of a step that are not read come with an option of this command."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from checkpoints import ckptconv_here


def test_parts_that_are_not_read_come_with_options_that_inspect_has(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state.w.exp_avg": torch.ones(2)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    text = " ".join(ckptconv_here("inspect", tmp_path / "step-1").out.split())
    assert "--optimizer PATH" not in text
    assert "Use --key optimizer for one of these parts, or --key . for everything." in text
    assert "exp_avg" in ckptconv_here("inspect", tmp_path / "step-1", "--key", "optimizer").out
