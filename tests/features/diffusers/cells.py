"""What tests of the trunk ask of pipelines too."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def scene(here: Path) -> None:
    """Put a pipeline beside what others made."""
    (here / "pipe" / "unet").mkdir(parents=True)
    (here / "pipe" / "model_index.json").write_text("{}")
    save_file({"w": torch.ones(3)}, here / "pipe" / "unet" / "diffusion_pytorch_model.safetensors")


REFUSED = """\
convert a.pt pipe
"""
