"""Objects that may be written into checkpoints, as `scan` judges them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here, done
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

KEEP = ("--opaque", "keep")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_objects_are_written_into_checkpoints_of_directories_too(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "odd": random.Random()}, tmp_path / "m.pt")
    ckptconv_here("safetensors2dcp", tmp_path / "m.pt", tmp_path / "out").refused(3, "Random", "--opaque keep")
    done(ckptconv_here("safetensors2dcp", tmp_path / "m.pt", tmp_path / "kept", *KEEP, "--no-fsync"))
    found: dict[str, Any] = {}
    reader = FileSystemReader(tmp_path / "kept")
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert type(found["odd"]) is random.Random
    torch.save({"odd": pytest.Config}, tmp_path / "m.pt")
    ckptconv_here("safetensors2dcp", tmp_path / "m.pt", tmp_path / "no", *KEEP).refused(3, "pytest")
