"""The format keeps what all promise."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from features.dcp.cases import checkpoint_of
from format_suite import FormatSuite
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


class TestDcp(FormatSuite):
    command, family = "dcp2safetensors", "dcp"
    case = "hsdp_2x2"

    def write(self, place: Path) -> Path:
        return Path(shutil.copytree(checkpoint_of(self.case), place / "step"))

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        made = checkpoint.parent.parent / "expected.pt"
        dcp_to_torch_save(checkpoint, made)
        return torch.load(made, weights_only=False)["model"]  # type: ignore[no-any-return]
