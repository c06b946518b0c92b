"""A universal checkpoint takes no grafts: it says so, and not that they are quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here
from safetensors.torch import save_file


def test_grafted_states_are_refused_by_their_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a": torch.ones(2)}, "m.safetensors")
    save_file({"a.exp_avg": torch.ones(2), "a.step": torch.ones(())}, "states.safetensors")
    words = ("convert", "m.safetensors", "step", "--to", "universal", "--graft", "states.safetensors:*")
    refused = ckptconv_here(*words).refused(2, "'a.exp_avg', 'a.step' of --graft", "then that checkpoint with")
    assert "quantized" not in refused
    assert not Path("step").exists()
