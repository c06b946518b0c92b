"""Several inputs become checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import save_file


def test_checkpoints_for_training_are_made_of_several_inputs(place: Path) -> None:
    torch.save({"s": {"x": torch.ones(3), "y": torch.zeros(2, 2)}, "epoch": 3}, "a.pt")
    save_file({"w": torch.ones(3)}, "b.safetensors")
    several = ["convert", "a.pt", "b.safetensors", "--output-dir", "o", "--to", "dcp"]
    ckptconv_here(*several, "--states", "a.pt").refused(2, "--states applies to one conversion")
    done(ckptconv_here(*several))
    assert {path.parent.name for path in (place / "o").rglob("*.metadata")} == {"a", "b"}
