"""A universal checkpoint is made of one input."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here


def test_universal_checkpoints_are_not_made_of_several_inputs(place: Path) -> None:
    for name in ("m.pt", "n.pt"):
        torch.save({"w": torch.ones(3)}, name)
    several = ["convert", "m.pt", "n.pt", "--output-dir", "o", "--to", "universal"]
    ckptconv_here(*several).refused(2, "--to universal applies to one conversion")
    assert not Path("o").exists()
