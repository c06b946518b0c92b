"""Safetensors that become `.pt` files, by the suite of every format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from format_suite import FormatSuite
from safetensors.torch import load_file, save_file


class TestSafetensors(FormatSuite):
    command, family, shards = "safetensors2pt", "safetensors", ()

    def write(self, place: Path) -> Path:
        save_file({f"layer{n}": torch.full((250, 300), float(n)) for n in range(3)}, place / "model.safetensors")
        return place / "model.safetensors"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return load_file(checkpoint)

    def output(self, tmp_path: Path) -> Path:
        return tmp_path / "out.pt"

    def loaded(self, output: Path) -> dict[str, torch.Tensor]:
        return torch.load(output, weights_only=True)  # type: ignore[no-any-return]

    @pytest.mark.skip("it is one file")
    def test_parts_make_what_one_process_makes(self, checkpoint: Path, tmp_path: Path) -> None:
        """Every part of one file is made by one process."""
