"""The option --spool-dir, of conversions that keep nothing in a temporary file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from checkpoints import ckptconv_here


def test_a_directory_is_checked_and_said_to_have_had_no_effect_where_nothing_is_kept(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    words = ["pt2safetensors", tmp_path / "model.pt", tmp_path / "out.safetensors", "--json", "--spool-dir"]
    run = ckptconv_here(*words, tmp_path / "nowhere")
    assert run.code == 2
    assert f"--spool-dir {tmp_path / 'nowhere'} is not a directory" in run.err
    assert os.listdir(tmp_path) == ["model.pt"]
    (note,) = ckptconv_here(*words, tmp_path).json["notes"]
    assert note.startswith("--spool-dir had no effect: nothing was")
