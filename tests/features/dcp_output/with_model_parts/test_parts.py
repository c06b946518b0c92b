"""A part of a model is the same by way of a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cells import VERIFIED
from features.model_facts import models
from safetensors.torch import load_file
from torch import equal

import ckptconv


def test_a_part_is_the_same_by_way_of_a_checkpoint(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", shapes, config)
    part: dict[str, Any] = {"layers": "0,3", "experts": "1-2"}
    ckptconv.convert(tmp_path / "m", tmp_path / "out", fsync=False, **part)
    ckptconv.convert(tmp_path / "m", tmp_path / "dcp", to="dcp", fsync=False, **VERIFIED, **part)
    ckptconv.convert(tmp_path / "dcp", tmp_path / "back.safetensors", fsync=False)
    wanted, found = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "back.safetensors")
    assert found.keys() == wanted.keys()
    assert all(equal(found[name], tensor) for name, tensor in wanted.items())
