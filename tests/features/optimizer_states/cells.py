"""What tests of the trunk ask of `optimizer_states` too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from optimizer_files import by_names

import ckptconv

# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put a training checkpoint among what others made."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (states,) = by_names(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": states}, here / "train.pt")


REFUSED = """\
convert train.pt new --optimizer hf
convert train.pt new --optimizer new
pt2safetensors train.pt new --optimizer hf
pt2safetensors train.pt -o hf
"""
WRITING: list[Callable[[], object]] = [lambda: ckptconv.convert("train.pt", "new", optimizer="hf")]
