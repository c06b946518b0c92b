"""Sharded sets keep what all formats promise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from format_suite import FormatSuite


class TestShardedSet(FormatSuite):
    command, family = "pt2safetensors", "torch"

    def write(self, place: Path) -> Path:
        names = {}
        for number in (1, 2):
            name = f"pytorch_model-0000{number}-of-00002.bin"
            torch.save({f"layer{number}": torch.full((250, 300), float(number))}, place / name)
            names[f"layer{number}"] = name
        index = {"metadata": {"total_size": 600_000}, "weight_map": names}
        (place / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return place

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return {f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)}
