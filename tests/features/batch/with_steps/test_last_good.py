"""Of each of several runs, the last good step is converted."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import load_file
from saved_steps import SAVERS, state_of


def test_last_good_takes_a_step_of_each_run(tmp_path: Path) -> None:
    runs = [SAVERS["trainer"].run(tmp_path / name, 10, 20) for name in ("a", "b")]
    os.truncate(runs[1] / "checkpoint-20" / "model.safetensors", 700)
    done(ckptconv_here("convert", "--last-good", *runs, "--output-dir", tmp_path / "out"))
    for name, number in (("a", 20), ("b", 10)):
        for key, tensor in load_file(tmp_path / "out" / name / "model.safetensors").items():
            assert torch.equal(tensor, state_of(number)[key])
