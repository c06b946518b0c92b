"""The sizes of a map, for a comparison with a checkpoint that has a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import ckptconv_here
from safetensors.torch import save_file

RULE = 'one = "{l}.qkv : (g (q + k) d) h"\nother = ["{l}.q : (g q d) h", "{l}.k : (g k d) h"]\n'
SIZES = '[sizes]\ng = "num_key_value_heads"\nd = "head_dim"\nk = 1\n'
FUSED = torch.arange(96.0).reshape(2, 3, 4, 4)  # groups, q and k in each, the size of a head, the model's


def test_sizes_come_from_the_configuration_of_the_other_side(place: Path) -> None:
    (place / "my.toml").write_text(f"[[rule]]\n{RULE}{SIZES}")
    torch.save({"0.qkv": FUSED.reshape(24, 4)}, "a.pt")
    (place / "b").mkdir()
    parts = {"0.q": FUSED[:, :2].reshape(16, 4), "0.k": FUSED[:, 2:].reshape(8, 4)}
    save_file({name: part.contiguous() for name, part in parts.items()}, "b/model.safetensors")
    words = ("diff", "a.pt", "b", "--map", "my.toml")
    assert "--size" in ckptconv_here(*words).refused(2)
    (place / "b" / "config.json").write_text(json.dumps({"num_key_value_heads": 2, "head_dim": 4}))
    for side in ("b", "b/model.safetensors"):
        assert "equal: 2 tensors" in ckptconv_here("diff", "a.pt", side, "--map", "my.toml").out, side
    # The configuration of A comes first.
    (place / "a").mkdir()
    (place / "a.pt").rename("a/pytorch_model.bin")
    (place / "a" / "config.json").write_text(json.dumps({"num_key_value_heads": 1, "head_dim": 8}))
    assert ckptconv_here("diff", "a", "b", "--map", "my.toml").code == 1
