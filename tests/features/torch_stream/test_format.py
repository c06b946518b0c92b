"""The stream format keeps what all promise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from checkpoints import seven_shards
from format_suite import FormatSuite


class TestStream(FormatSuite):
    command, family = "pt2safetensors", "torch"

    def write(self, place: Path) -> Path:
        state = torch.load(seven_shards(place / "model.pt"), weights_only=True)
        torch.save(state, place / "model.pt", _use_new_zipfile_serialization=False)
        return place / "model.pt"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return torch.load(checkpoint, weights_only=True)  # type: ignore[no-any-return]
