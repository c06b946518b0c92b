"""Checkpoints that `scan` judges: objects that may be written into them, and data that nothing describes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here, done
from features.dcp.cases import checkpoint_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptconv

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


@pytest.mark.parametrize("head", [b"7z\xbc\xaf\x27\x1c", b"\x28\xb5\x2f\xfd", bytes(512) + b"\x80\x02N."])
@pytest.mark.parametrize("kind", ["fsdp2_w2_nested", "zstd_w2"])
def test_data_that_no_description_beside_it_mentions_is_unknown(kind: str, head: bytes, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of(kind), tmp_path / "x")
    (tmp_path / "x/__9_9.distcp").write_bytes(head + bytes(50))
    told = {Path(file.path).name: [each.rule for each in file.findings] for file in ckptconv.scan(tmp_path).files}
    assert [name for name, rules in told.items() if rules == ["not-opened"]] == ["__9_9.distcp"]
