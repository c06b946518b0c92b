"""Every format of the trunk keeps what all promise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from checkpoints import seven_shards
from format_suite import FormatSuite
from safetensors.torch import load_file, save_file

# ------------------------------------------------------------------------------------------------------ files of torch


class TestZip(FormatSuite):
    command, family = "pt2safetensors", "torch"

    def write(self, place: Path) -> Path:
        return seven_shards(place / "model.pt")

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return torch.load(checkpoint, weights_only=True)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------- directories


class TestSafetensors(FormatSuite):
    command, family = "convert", "safetensors"

    def write(self, place: Path) -> Path:
        save_file({f"layer{n}": torch.full((250, 300), float(n)) for n in range(3)}, place / "model.safetensors")
        return place / "model.safetensors"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return load_file(checkpoint)
