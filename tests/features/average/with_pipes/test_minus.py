"""A minus between checkpoints, as in a sum on paper."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import load_file, save_file


def test_it_leads_to_the_command_for_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("tuned", 3.0), ("base", 1.0)):
        save_file({"w": torch.full((2,), value)}, f"{name}.safetensors")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    words = ["average", "tuned.safetensors", "-", "base.safetensors"]
    said = ckptconv_here(*words)
    difference = ["average", "tuned.safetensors", "--minus", "base.safetensors"]
    said.refused(said.code, f"For a difference: ckptconv {' '.join(difference)} OUTPUT.")
    done(ckptconv_here(*difference, "out.safetensors"))
    assert torch.equal(load_file("out.safetensors")["w"], torch.full((2,), 2.0))
