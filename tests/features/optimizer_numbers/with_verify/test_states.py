"""States that are stored by number are verified by name."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import save_file
from torch import nn


def test_an_adapter_s_states_in_a_directory_are_verified(tmp_path: Path) -> None:
    factors = {f"base_model.model.q.lora_{half}.weight": nn.Parameter(torch.ones(1)) for half in "AB"}
    optimizer = torch.optim.AdamW(factors.items())
    for each in factors.values():
        each.grad = torch.ones_like(each)
    optimizer.step()
    save_file({name: each.detach() for name, each in factors.items()}, tmp_path / "adapter_model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    words = [tmp_path, tmp_path / "out", "--optimizer", tmp_path / "states"]
    assert ckptconv_here("convert", *words).code == 0
    done(ckptconv_here("verify", *words))
