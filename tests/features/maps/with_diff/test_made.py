"""A checkpoint as a map makes it is compared with another one."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here


def test_what_a_map_makes_of_the_first_is_compared(place: Path) -> None:
    told = 'drop = ["*._extra_state"]\n[[rule]]\none = "{l}.qkv : (q + k) h"\nother = ["{l}.q : q h", "{l}.k : k h"]\n'
    (place / "my.toml").write_text(f"{told}[sizes]\nq = 8\nk = 4\n")
    torch.save({"0.qkv": torch.arange(48.0).reshape(12, 4), "0._extra_state": torch.ones(2)}, "m.pt")
    assert ckptconv_here("convert", "m.pt", "other.safetensors", "--map", "my.toml").code == 0
    run = ckptconv_here("diff", "m.pt", "other.safetensors", "--map", "my.toml")
    assert (run.code, "equal: 2 tensors" in run.out) == (0, True)
    assert "left out, because the map my.toml drops them: '0._extra_state'" in run.err
    assert ckptconv_here("diff", "m.pt", "other.safetensors").code == 1
